/** The tone of an exit: which of the colours and underlines of page.css it has. Exits beyond them begin anew. */

const NUM_TONES = 6;

export const tone = (exit) => ((exit - 1) % NUM_TONES) + 1;
