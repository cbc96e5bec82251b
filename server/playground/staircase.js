/**
 * Which block has computed which row, derived from the exits. Knows nothing of the page.
 *
 * As for a sequence served alone: its next block runs with every row deferred there. Row i emitted token i; row 0 is the
 * whole prompt, whose rows move together. Blocks and exits count from 1.
 */
export class Staircase {
  #exits = [];
  #fronts; // per block, the last row of each of its Steps

  constructor(numBlocks) {
    this.numBlocks = numBlocks;
    this.#fronts = Array.from({ length: numBlocks }, () => []);
  }

  get numRows() {
    return this.#exits.length;
  }

  /** The next token left at this exit. Returns the Steps of its row: {block, first, last}, `first` and `last` rows. */
  emit(exit) {
    const last = this.#exits.push(exit) - 1;
    return Array.from({ length: exit }, (_, lower) => {
      const first = this.filled(lower + 1);
      this.#fronts[lower].push(last);
      return { block: lower + 1, first, last };
    });
  }

  /** The number of rows a block has computed. */
  filled(block) {
    return (this.#fronts[block - 1].at(-1) ?? -1) + 1;
  }

  /** The rows deferred before a block, from `first` up to but excluding `end`. */
  deferred(block) {
    return { first: this.filled(block), end: block === 1 ? this.numRows : this.filled(block - 1) };
  }

  /** The row, this or a later one, whose Step took `row` through a block; undefined if it is still deferred. */
  carrier(row, block) {
    return this.#fronts[block - 1].find((front) => front >= row);
  }
}
