// Nodes of the radix tree laid out as an icicle: each path from the root is one unit wide, and depth is in tokens. Pure.

import { visible } from "./words.js";

export const TIERS = ["device", "host", "disk", "hidden"];

/** What a node's pages are in, the fastest first; empty for a node without any. */
export function tiersOf(node) {
  return TIERS.filter((tier) => Object.values(node[tier] ?? {}).some((held) => held > 0));
}

/**
 * The layout of `nodes`: `order` holds boxes {node, level, x0, x1, y0, y1, parent, children, hottest, leaves} with each parent
 * before its children, `roots` one band {namespace, x0, x1, boxes} per namespace, `width` in paths, `depth` in tokens,
 * `hottest` the most hits. A node whose parent is not among `nodes` stands at the top of its namespace.
 */
export function layOut(nodes) {
  const boxes = new Map(nodes.map((node) => [node.id, { node, children: [], parent: null, level: 0 }]));
  const namespaces = new Map();
  for (const box of boxes.values()) {
    const parent = boxes.get(box.node.parent);
    if (parent) {
      box.parent = parent;
      parent.children.push(box);
    } else {
      if (!namespaces.has(box.node.namespace)) namespaces.set(box.node.namespace, []);
      namespaces.get(box.node.namespace).push(box);
    }
  }
  const order = [];
  for (const tops of namespaces.values()) {
    // By hand: a conversation may be deeper than the stack.
    const waiting = [...tops].reverse();
    while (waiting.length) {
      const box = waiting.pop();
      box.level = box.parent ? box.parent.level + 1 : 0;
      order.push(box);
      for (let place = box.children.length - 1; place >= 0; place -= 1) waiting.push(box.children[place]);
    }
  }
  for (let place = order.length - 1; place >= 0; place -= 1) {
    const box = order[place];
    box.leaves = box.children.reduce((sum, child) => sum + child.leaves, 0) || 1;
    box.hottest = box.children.reduce((most, child) => Math.max(most, child.hottest), box.node.hits);
    box.deepest = box.children.reduce((most, child) => Math.max(most, child.deepest), box.node.depth + box.node.tokens);
  }
  let x = 0;
  const roots = [];
  for (const [namespace, tops] of namespaces) {
    const begin = x;
    for (const top of tops) {
      place(top, x);
      x += top.leaves;
    }
    roots.push({ namespace, x0: begin, x1: x, boxes: tops });
  }
  for (const box of order) {
    let from = box.x0;
    for (const child of box.children) {
      place(child, from);
      from += child.leaves;
    }
  }
  return {
    order, roots, boxes, width: x, depth: order.reduce((most, box) => Math.max(most, box.y1), 0),
    hottest: order.reduce((most, box) => Math.max(most, box.node.hits), 0),
  };
}

function place(box, x0) {
  box.x0 = x0;
  box.x1 = x0 + box.leaves;
  box.y0 = box.node.depth;
  box.y1 = box.node.depth + box.node.tokens;
}

/** The text that a node begins with, or its tokens where the gateway tells none. */
export const beginning = (node) => visible(node.head_text ?? node.head.join(" "));

/** Whether a node is one that a person looks for: by id, first text, namespace or pin. */
export function matches(node, wanted) {
  const text = wanted.toLowerCase();
  return String(node.id) === text || (node.head_text ?? "").toLowerCase().includes(text) || node.namespace.startsWith(text)
    || node.pins.some((pin) => pin.toLowerCase().includes(text));
}

/** From 0 (never hit) to 1 (the hottest of all), on a scale of powers. */
export function heat(hits, hottest) {
  return hottest > 0 ? Math.log1p(hits) / Math.log1p(hottest) : 0;
}

/** The innermost box at a place, null for none. */
export function boxAt(layout, x, y) {
  let found = null;
  let among = layout.roots.find((root) => x >= root.x0 && x < root.x1)?.boxes ?? [];
  for (;;) {
    const next = childAt(among, x);
    if (!next || y < next.y0) return found;
    if (y < next.y1) return next;
    found = null;
    among = next.children;
  }
}

function childAt(boxes, x) {
  let low = 0;
  let high = boxes.length - 1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (x < boxes[middle].x0) high = middle - 1;
    else if (x >= boxes[middle].x1) low = middle + 1;
    else return boxes[middle];
  }
  return null;
}
