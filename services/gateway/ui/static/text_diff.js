// Where two short texts differ, word by word. Pure.

const MOST_WORDS = 200; // The table below has the square of it.

/** `[one, other]`, each a list of {text, isCommon} that makes up its text: the longest common run of words is common. */
export function wordDiff(one, other) {
  const [mine, theirs] = [words(one), words(other)];
  if (mine.length > MOST_WORDS || theirs.length > MOST_WORDS) return [[{ text: one, isCommon: false }], [{ text: other, isCommon: false }]];
  // longest[i][j]: words that mine[i:] and theirs[j:] share in order.
  const longest = Array.from({ length: mine.length + 1 }, () => new Uint16Array(theirs.length + 1));
  for (let i = mine.length - 1; i >= 0; i -= 1) {
    for (let j = theirs.length - 1; j >= 0; j -= 1) {
      longest[i][j] = mine[i] === theirs[j] ? longest[i + 1][j + 1] + 1 : Math.max(longest[i + 1][j], longest[i][j + 1]);
    }
  }
  const sides = [[], []];
  let [i, j] = [0, 0];
  while (i < mine.length || j < theirs.length) {
    if (i < mine.length && j < theirs.length && mine[i] === theirs[j]) {
      for (const side of sides) add(side, mine[i], true);
      i += 1; j += 1;
    } else if (j >= theirs.length || (i < mine.length && longest[i + 1][j] >= longest[i][j + 1])) add(sides[0], mine[i++], false);
    else add(sides[1], theirs[j++], false);
  }
  return sides;
}

const words = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];

function add(side, text, isCommon) {
  if (side.at(-1)?.isCommon === isCommon) side.at(-1).text += text;
  else side.push({ text, isCommon });
}
