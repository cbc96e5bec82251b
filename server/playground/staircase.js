/**
 * Which block has computed which row, reckoned from the exits alone. Knows nothing of pages.
 *
 * As for a sequence served alone: its next block runs, with every row that waits there. Row i is the one that spoke
 * token i; row 0 stands for the whole prompt, whose rows move together. Blocks and exits count from 1.
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

  get numSteps() {
    return this.#exits.reduce((sum, exit) => sum + exit, 0);
  }

  /** A further token left at this exit. Returns the Steps that its row took: {block, first, last}, of rows. */
  emit(exit) {
    const last = this.#exits.push(exit) - 1;
    return Array.from({ length: exit }, (_, lower) => {
      const first = this.filled(lower + 1);
      this.#fronts[lower].push(last);
      return { block: lower + 1, first, last };
    });
  }

  exit(row) {
    return this.#exits[row];
  }

  /** How many rows a block has computed. */
  filled(block) {
    return (this.#fronts[block - 1].at(-1) ?? -1) + 1;
  }

  /** The rows that wait for a block: from `first` up to, not with, `end`. */
  waiting(block) {
    return { first: this.filled(block), end: block === 1 ? this.numRows : this.filled(block - 1) };
  }

  /** The row whose Step took a row through a block, that row itself or a later one; undefined if it still waits. */
  carrier(row, block) {
    return this.#fronts[block - 1].find((front) => front >= row);
  }
}
