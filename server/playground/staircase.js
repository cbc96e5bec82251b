/**
 * Derives from the exits which block has computed which row, for a sequence that is served alone.
 *
 * A block runs with all rows that are deferred before it. If the blocks share their weights (`isTied`), a Step runs all
 * blocks at once, and moves each row by one block. Row i emits token i. Row 0 stands for the whole prompt. Blocks and
 * exits count from 1.
 */
export class Staircase {
  #exits = [];
  #isTied;
  #runs; // per block, {end, front}: rows before `end` are computed since the Steps of the row `front`

  constructor(numBlocks, isTied = false) {
    this.numBlocks = numBlocks;
    this.#isTied = isTied;
    this.#runs = Array.from({ length: numBlocks }, () => []);
  }

  get numRows() {
    return this.#exits.length;
  }

  /** Add the next token's exit. Return the runs of its Steps as {block, first, last}, with the first and last row. */
  emit(exit) {
    this.#exits.push(exit);
    return Array.from({ length: exit }, (_, lower) => (this.#isTied ? this.#runAll() : [this.#run(lower + 1)])).flat();
  }

  /** Return the number of rows that a block has computed. */
  filled(block) {
    return this.#runs[block - 1].at(-1)?.end ?? 0;
  }

  /** Return the rows deferred before a block: from `first` (included) to `end` (excluded). */
  deferred(block) {
    return { first: this.filled(block), end: block === 1 ? this.numRows : this.filled(block - 1) };
  }

  /** Return the row whose Step took `row` through a block, or undefined if `row` is still deferred there. */
  carrier(row, block) {
    return this.#runs[block - 1].find(({ end }) => end > row)?.front;
  }

  /** Run each block with the rows that are deferred before it. */
  #runAll() {
    const ends = this.#runs.map((_, lower) => this.deferred(lower + 1).end);
    return ends.flatMap((end, lower) => (this.filled(lower + 1) < end ? [this.#run(lower + 1, end)] : []));
  }

  #run(block, end = this.numRows) {
    const first = this.filled(block);
    this.#runs[block - 1].push({ end, front: this.numRows - 1 });
    return { block, first, last: end - 1 };
  }
}
