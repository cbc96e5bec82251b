/** Reads server-sent events. */

/** The data of each event, as text. Skips comments, which keep an idle stream alive. */
export async function* events(body) {
  let held = "";
  for await (const text of pieces(body)) {
    const parts = (held + text).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) yield part.slice("data: ".length);
    }
  }
}

async function* pieces(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let piece; !(piece = await reader.read()).done; ) yield piece.value;
  } finally {
    reader.cancel().catch(() => {});
  }
}
