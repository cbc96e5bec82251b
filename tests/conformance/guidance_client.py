"""What guidance makes of a server: an object of a schema, then a text. guidance_client.py URL MODEL, prints JSON."""

import json
import sys

from guidance import assistant, gen, models, user
from guidance import json as object_of

PLACE = {"type": "object", "properties": {"city": {"type": "string"}}}
PLACE |= {"required": ["city"], "additionalProperties": False}

url, name = sys.argv[1:]
model = models.OpenAI(name, base_url=url, api_key="none", echo=False)
with user():
    model += "Where?"
with assistant():
    model += object_of("place", schema=PLACE)
with user():
    model += "How is the weather?"
with assistant():
    model += gen("weather", max_tokens=9)  # it joins the tokens of logprobs, and would show end-of-text
print(json.dumps({**json.loads(model["place"]), "weather": model["weather"]}))
