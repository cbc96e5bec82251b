/** An exit's tone is the number of its colour and underline in page.css. Tones repeat after the sixth exit. */

const NUM_TONES = 6;

export const tone = (exit) => ((exit - 1) % NUM_TONES) + 1;
