"""What instructor makes of a server: objects, in six modes. instructor_client.py URL MODEL, prints JSON."""

import json
import sys
from collections.abc import Iterable

import instructor
from instructor import Mode
from openai import OpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    city: str


url, model = sys.argv[1:]
openai = OpenAI(base_url=url, api_key="none", max_retries=0)
asked = {"model": model, "messages": [{"role": "user", "content": "What is the weather in Bern?"}], "max_retries": 0}
made = {}
for mode in (Mode.TOOLS, Mode.JSON, Mode.JSON_SCHEMA, Mode.MD_JSON, Mode.RESPONSES_TOOLS, Mode.PARALLEL_TOOLS):
    limit = {"max_output_tokens" if mode is Mode.RESPONSES_TOOLS else "max_tokens": 120}
    form = Iterable[Weather] if mode is Mode.PARALLEL_TOOLS else Weather
    got = instructor.from_openai(openai, mode=mode).create(**asked, response_model=form, **limit)
    made[mode.name] = [each.city for each in ([got] if isinstance(got, Weather) else got)]
print(json.dumps(made))
