"""Write generated text as a web page. Colours show the exit of each token, and tooltips its exit, p_k and time."""

from collections.abc import Sequence
from html import escape
from typing import Any

from tokenizers.decoders import DecodeStream

from nvium_core.engine.params import SamplingParams
from nvium_core.loading import LoadedModel
from research.speed import OPENING_CHARACTERS, TimedToken, generate, warm_engine

COLOURS = ("#8dd3c7", "#fdb462", "#bebada", "#fb8072", "#80b1d3", "#b3de69", "#fccde5", "#d9d9d9")
"""Colours of the exits. With more exits than colours, the colours repeat. Black text is legible on every colour."""

SAMPLES, SAMPLE_TOKENS = 3, 200

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 17px/1.7 Georgia, serif; max-width: 46em; margin: 2em auto; padding: 0 1em; color: #222 }}
p {{ white-space: pre-wrap; margin: 1.5em 0 }}
i {{ font-style: normal; color: #777 }}
b {{ font-weight: normal; border-radius: .2em; padding: .1em 0 }}
li {{ display: inline-block; margin-right: 1.5em }} ul {{ padding: 0 }}
{colours}
</style>
<h1>{title}</h1>
<ul>{legend}</ul>
{texts}
</html>
"""


def page(loaded: LoadedModel, texts: Sequence[tuple[Sequence[int], Sequence[TimedToken]]]) -> str:
    """Render prompts and their continuations as an HTML page."""
    exit_layers = loaded.model.config.exit_layers or []
    used = [token.exit for _, tokens in texts for token in tokens]
    legend = (
        f'<li><b class="e{k}">exit {k}</b> layer {depth}, {used.count(k) / max(1, len(used)):.0%} of tokens'
        for k, depth in enumerate(exit_layers, 1)
    )
    colours = (f".e{k} {{ background: {COLOURS[(k - 1) % len(COLOURS)]} }}" for k in range(1, len(exit_layers) + 1))
    return PAGE.format(
        title=f"{escape(loaded.name)}: which token left at which exit",
        colours="\n".join(colours),
        legend="".join(legend),
        texts="\n".join(paragraph(loaded, prompt, tokens) for prompt, tokens in texts),
    )


def paragraph(loaded: LoadedModel, prompt: Sequence[int], tokens: Sequence[TimedToken]) -> str:
    """Render the prompt in grey, then each token in colour. A token that ends inside a character shows no text."""
    tokenizer: Any = loaded.tokenizer.backend_tokenizer
    decoder = DecodeStream(list(prompt), skip_special_tokens=True)
    opening = loaded.tokenizer.decode(list(prompt), skip_special_tokens=True)
    spans = (span(decoder.step(tokenizer, token.token_id) or "", token) for token in tokens)
    return f"<p><i>{escape(str(opening))}</i>{''.join(spans)}</p>"


def span(text: str, token: TimedToken) -> str:
    title = f"exit {token.exit}, p {token.exit_probability:.2f}, {1000 * token.seconds:.1f} ms"
    return f'<b class="e{token.exit}" title="{title}">{escape(text)}</b>'


def samples(loaded: LoadedModel, documents: Sequence[str]) -> str:
    """Render how the model continues the openings of documents."""
    engine = warm_engine(loaded.model, "sweep")
    texts = []
    for seed, document in enumerate(documents[:SAMPLES]):
        prompt = loaded.tokenizer(document[:OPENING_CHARACTERS]).input_ids[: engine.context // 2]
        params = SamplingParams(max_tokens=min(SAMPLE_TOKENS, engine.context // 2), seed=seed)
        texts.append((prompt, generate(engine, prompt, params)))
    return page(loaded, texts)
