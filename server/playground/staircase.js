/**
 * Derives from the exits which block has computed which row, for a sequence that is served alone.
 *
 * A block runs with all rows that are deferred before it. Row i emits token i. Row 0 stands for the whole prompt. Blocks
 * and exits count from 1.
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

  /** Add the next token's exit. Return the Steps that emit it as {block, first, last}, with the first and last row. */
  emit(exit) {
    const last = this.#exits.push(exit) - 1;
    return Array.from({ length: exit }, (_, lower) => {
      const first = this.filled(lower + 1);
      this.#fronts[lower].push(last);
      return { block: lower + 1, first, last };
    });
  }

  /** Return the number of rows that a block has computed. */
  filled(block) {
    return (this.#fronts[block - 1].at(-1) ?? -1) + 1;
  }

  /** Return the rows deferred before a block: from `first` (included) to `end` (excluded). */
  deferred(block) {
    return { first: this.filled(block), end: block === 1 ? this.numRows : this.filled(block - 1) };
  }

  /** Return the row whose Step took `row` through a block, or undefined if `row` is still deferred there. */
  carrier(row, block) {
    return this.#fronts[block - 1].find((front) => front >= row);
  }
}
