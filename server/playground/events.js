/** Reads server-sent events. */

/** Yield the data of each event as text. Skip keep-alive comments. */
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
