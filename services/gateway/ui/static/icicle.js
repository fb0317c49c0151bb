// The icicle on a canvas: drawing what can be seen, and moving about in it by pointer, wheel and keys.

import { TIERS, beginning, boxAt, heat, tiersOf } from "./tree_model.js";

const BAND = 22; // Pixels above the tree for the names of namespaces.
const LEFT = 46; // Pixels for the scale of tokens.
const THIN = 0.7; // A subtree narrower than this many pixels is drawn as one.
const CLICK_PX = 5;

export class Icicle extends EventTarget {
  layout = null; found = null; colorBy = "hotness"; picked = null;
  #canvas; #view = { x0: 0, x1: 1, y0: 0, y1: 1 }; #colors = {}; #waiting = false; #pointers = new Map(); #moved = 0;

  /** Tells `pick` when a person chose a node, whose id is then in `picked`. */
  constructor(canvas) {
    super();
    this.#canvas = canvas;
    new ResizeObserver(() => this.draw()).observe(canvas);
    canvas.addEventListener("wheel", (event) => { event.preventDefault(); this.zoom(1.0015 ** event.deltaY, event.offsetX, event.offsetY, !event.shiftKey); }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); this.#pointers.set(event.pointerId, event); this.#moved = 0; });
    canvas.addEventListener("pointermove", (event) => this.#drag(event));
    canvas.addEventListener("pointerup", (event) => this.#release(event));
    canvas.addEventListener("pointercancel", (event) => this.#pointers.delete(event.pointerId));
    canvas.addEventListener("dblclick", () => this.zoomTo(this.picked));
    canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  /** Show another tree; the view stays where it is when `keep`. */
  show(layout, keep) {
    this.layout = layout;
    if (!layout.boxes.has(this.picked)) this.picked = null;
    if (keep) this.draw(); else this.fit();
  }

  fit() {
    this.#view = { x0: 0, x1: Math.max(1, this.layout?.width ?? 1), y0: 0, y1: 1.02 * Math.max(1, this.layout?.depth ?? 1) };
    this.draw();
  }

  /** Zoom so that a node and what is below it fills the picture. */
  zoomTo(id) {
    const box = this.layout?.boxes.get(id);
    if (!box) return;
    const margin = (box.x1 - box.x0) * 0.04;
    const height = Math.max(box.deepest - box.y0, 16);
    this.#view = { x0: box.x0 - margin, x1: box.x1 + margin, y0: box.y0 - height * 0.04, y1: box.y0 + height * 1.04 };
    this.#clamp();
    this.draw();
  }

  /** Zoom by a factor (below 1: closer) about a place in pixels, in x and, with `both`, in y. */
  zoom(factor, px = this.#canvas.clientWidth / 2, py = BAND, both = true) {
    const view = this.#view;
    const x = this.#xAt(px);
    const y = this.#yAt(py);
    view.x0 = x - (x - view.x0) * factor; view.x1 = x + (view.x1 - x) * factor;
    if (both) { view.y0 = y - (y - view.y0) * factor; view.y1 = y + (view.y1 - y) * factor; }
    this.#clamp();
    this.draw();
  }

  pick(id) {
    this.picked = id;
    this.draw();
    this.dispatchEvent(new Event("pick"));
  }

  /** Draw once before the next frame. */
  draw() {
    if (this.#waiting) return;
    this.#waiting = true;
    requestAnimationFrame(() => { this.#waiting = false; this.#paint(); });
  }

  #clamp() {
    if (!this.layout) return;
    const limit = (low, high, least, most, smallest) => {
      const span = Math.min(Math.max(high - low, smallest), most - least);
      const from = Math.min(Math.max(low, least), most - span);
      return [from, from + span];
    };
    const view = this.#view;
    const slack = this.layout.width * 0.05;
    [view.x0, view.x1] = limit(view.x0, view.x1, -slack, Math.max(1, this.layout.width) + slack, 0.5);
    [view.y0, view.y1] = limit(view.y0, view.y1, -this.layout.depth * 0.05, 1.1 * Math.max(1, this.layout.depth), 16);
  }

  #xAt(px) { const { x0, x1 } = this.#view; return x0 + ((px - LEFT) / (this.#canvas.clientWidth - LEFT)) * (x1 - x0); }
  #yAt(py) { const { y0, y1 } = this.#view; return y0 + ((py - BAND) / (this.#canvas.clientHeight - BAND)) * (y1 - y0); }

  #drag(event) {
    const before = this.#pointers.get(event.pointerId);
    if (!before || !this.layout) return;
    const others = [...this.#pointers.values()].filter((other) => other.pointerId !== event.pointerId);
    this.#pointers.set(event.pointerId, event);
    this.#moved += Math.abs(event.offsetX - before.offsetX) + Math.abs(event.offsetY - before.offsetY);
    if (others.length) {
      const far = (one) => Math.hypot(one.offsetX - others[0].offsetX, one.offsetY - others[0].offsetY) || 1;
      this.zoom(far(before) / far(event), (event.offsetX + others[0].offsetX) / 2, (event.offsetY + others[0].offsetY) / 2);
      return;
    }
    const dx = this.#xAt(before.offsetX) - this.#xAt(event.offsetX);
    const dy = this.#yAt(before.offsetY) - this.#yAt(event.offsetY);
    this.#move(dx, dy);
  }

  #move(dx, dy) {
    const view = this.#view;
    view.x0 += dx; view.x1 += dx; view.y0 += dy; view.y1 += dy;
    this.#clamp();
    this.draw();
  }

  #release(event) {
    this.#pointers.delete(event.pointerId);
    if (this.#moved > CLICK_PX || !this.layout) return;
    const box = boxAt(this.layout, this.#xAt(event.offsetX), this.#yAt(event.offsetY));
    this.pick(box?.node.id ?? null);
  }

  #key(event) {
    if (!this.layout || event.ctrlKey || event.metaKey || event.altKey) return;
    const box = this.layout.boxes.get(this.picked);
    const siblings = box ? (box.parent ? box.parent.children : this.layout.roots.flatMap((root) => root.boxes)) : [];
    const beside = (step) => siblings[siblings.indexOf(box) + step];
    const view = this.#view;
    const to = {
      ArrowUp: () => box?.parent, ArrowDown: () => (box ? box.children[0] : this.layout.roots[0]?.boxes[0]),
      ArrowLeft: () => beside(-1), ArrowRight: () => beside(1),
    }[event.key];
    if (to && event.shiftKey) {
      const [dx, dy] = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[event.key];
      this.#move((dx * (view.x1 - view.x0)) / 8, (dy * (view.y1 - view.y0)) / 8);
    } else if (to) {
      const next = to();
      if (next) { this.pick(next.node.id); this.#reveal(next); }
    } else if (event.key === "Enter") this.zoomTo(this.picked);
    else if (event.key === "+" || event.key === "=") this.zoom(0.8);
    else if (event.key === "-") this.zoom(1.25);
    else if (event.key === "0") this.fit();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  #reveal(box) {
    const view = this.#view;
    if (box.x1 <= view.x0 || box.x0 >= view.x1) this.#move((box.x0 + box.x1) / 2 - (view.x0 + view.x1) / 2, 0);
    if (box.y1 <= view.y0 || box.y0 >= view.y1) this.#move(0, box.y0 - (view.y0 + view.y1) / 2);
  }

  #paint() {
    const canvas = this.#canvas;
    const scale = window.devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width || !height) return;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    this.#readColors();
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.fillStyle = this.#colors.panel;
    pen.fillRect(0, 0, width, height);
    pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
    pen.textBaseline = "middle";
    if (!this.layout) return;
    const { x0, x1, y0, y1 } = this.#view;
    const across = (x) => LEFT + ((x - x0) / (x1 - x0)) * (width - LEFT);
    const down = (y) => BAND + ((y - y0) / (y1 - y0)) * (height - BAND);
    this.#paintScale(pen, y0, y1, down, width, height);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, BAND, width - LEFT, height - BAND);
    pen.clip();
    for (const root of this.layout.roots) {
      const waiting = root.boxes.filter((box) => box.x1 > x0 && box.x0 < x1);
      while (waiting.length) {
        const box = waiting.pop();
        const wide = across(box.x1) - across(box.x0);
        if (wide < THIN) {
          // Too narrow to tell apart: the whole subtree in the colour of its hottest node.
          pen.fillStyle = this.#fillOf(box, box.hottest);
          pen.fillRect(across(box.x0), down(box.y0), THIN, down(box.deepest) - down(box.y0));
          continue;
        }
        if (box.y1 > y0 && box.y0 < y1) this.#paintBox(pen, box, across, down, width);
        if (box.y1 < y1) for (const child of box.children) if (child.x1 > x0 && child.x0 < x1) waiting.push(child);
      }
    }
    const picked = this.layout.boxes.get(this.picked);
    if (picked) {
      pen.strokeStyle = this.#colors.ink;
      pen.lineWidth = 3;
      pen.strokeRect(across(picked.x0), down(picked.y0) + 1, Math.max(2, across(picked.x1) - across(picked.x0)), Math.max(2, down(picked.y1) - down(picked.y0) - 1));
    }
    pen.restore();
    for (const root of this.layout.roots) {
      const [from, to] = [Math.max(LEFT, across(root.x0)), Math.min(width, across(root.x1))];
      if (to - from < 3) continue;
      pen.fillStyle = this.#colors.line;
      pen.fillRect(from, BAND - 3, Math.max(1, to - from - 1), 2);
      pen.fillStyle = this.#colors.quiet;
      label(pen, `namespace ${root.namespace.slice(0, 8)}`, from + 3, 10, to - from - 6);
    }
  }

  #paintScale(pen, y0, y1, down, width, height) {
    const rough = ((y1 - y0) * 70) / Math.max(height - BAND, 1);
    const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
    const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough) ?? 10 * power;
    for (let y = Math.max(0, Math.ceil(y0 / step) * step); y < y1; y += step) {
      pen.fillStyle = this.#colors.line;
      pen.fillRect(LEFT - 4, down(y), width, 1);
      pen.fillStyle = this.#colors.quiet;
      pen.textAlign = "right";
      pen.fillText(y >= 10000 ? `${y / 1000}k` : String(y), LEFT - 7, Math.max(down(y), BAND));
      pen.textAlign = "left";
    }
  }

  #paintBox(pen, box, across, down, width) {
    const [left, right, top, bottom] = [across(box.x0), across(box.x1), down(box.y0), down(box.y1)];
    const isFaint = this.found && !this.found.has(box.node.id);
    const gap = right - left > 4 ? 1 : 0;
    const high = Math.max(bottom - top - (bottom - top > 4 ? 1 : 0), 0.6);
    pen.globalAlpha = isFaint ? 0.22 : 1;
    pen.fillStyle = this.#fillOf(box, box.node.hits);
    pen.fillRect(left, top, right - left - gap, high);
    if (this.colorBy === "hotness" && right - left > 9) {
      // A stripe on the left for each tier that holds it.
      const held = tiersOf(box.node);
      held.forEach((tier, place) => {
        pen.fillStyle = this.#colors[tier];
        pen.fillRect(left, top + (high * place) / held.length, 3, high / held.length);
      });
    }
    if (box.node.pins.length && right - left > 6) {
      pen.fillStyle = this.#colors.ink;
      pen.beginPath();
      pen.arc(right - gap - 5, top + Math.min(5, high / 2), 2.5, 0, 7);
      pen.fill();
    }
    if (right - left > 34 && high > 12) {
      pen.fillStyle = this.#inkOn(box);
      const from = Math.max(left, LEFT);
      label(pen, firstWords(box.node), from + 7, Math.min(Math.max(top, BAND) + 10, bottom - 5), Math.min(right, width) - from - 12);
    }
    pen.globalAlpha = 1;
  }

  #fillOf(box, hits) {
    const colors = this.#colors;
    if (this.colorBy === "tier") return colors[tiersOf(box.node)[0]] ?? colors.computed;
    const warmth = heat(hits, this.layout.hottest);
    if (!hits) return colors.cold;
    return warmth < 0.5 ? mix(colors.tepid, colors.warm, 2 * warmth) : mix(colors.warm, colors.hot, 2 * warmth - 1);
  }

  #inkOn(box) {
    const fill = this.#fillOf(box, box.node.hits);
    const [red, green, blue] = numbers(fill);
    return 0.3 * red + 0.59 * green + 0.11 * blue > 125 ? "#0b1b24" : "#ffffff";
  }

  #readColors() {
    // Computed anew for each picture, so that another colour scheme shows at once.
    const probe = this.#canvas.parentElement;
    const before = probe.style.color;
    for (const name of [...TIERS, "computed", "cold", "tepid", "warm", "hot", "ink", "quiet", "line", "panel"]) {
      probe.style.color = `var(--${name})`;
      this.#colors[name] = getComputedStyle(probe).color;
    }
    probe.style.color = before;
  }
}

/** The beginning of a node's text, without the tokens that begin every chat. */
function firstWords(node) {
  return beginning(node).replace(/^(<s>|<\|[^|]*\|>)+/, "").replace(/\s+/g, " ").trim();
}

const numbers = (color) => color.match(/[\d.]+/g).map(Number);

function mix(one, other, share) {
  const [from, to] = [numbers(one), numbers(other)];
  return `rgb(${[0, 1, 2].map((at) => Math.round(from[at] + (to[at] - from[at]) * share)).join(",")})`;
}

/** Text cut to a width, with what was cut marked. */
function label(pen, text, x, y, width) {
  if (width < 20) return;
  let shown = text.slice(0, Math.floor(width / 4));
  while (shown && pen.measureText(shown === text ? shown : `${shown}…`).width > width) shown = shown.slice(0, -Math.max(1, Math.floor(shown.length / 12)));
  if (shown) pen.fillText(shown === text ? shown : `${shown}…`, x, y);
}
