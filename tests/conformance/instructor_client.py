"""What instructor makes of a server: an object, of a forced call. instructor_client.py URL MODEL, prints JSON."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    city: str


url, model = sys.argv[1:]
client = instructor.from_openai(OpenAI(base_url=url, api_key="none", max_retries=0))
messages = [{"role": "user", "content": "What is the weather in Bern?"}]
made = client.create(model=model, messages=messages, response_model=Weather, max_tokens=60, max_retries=0)
print(made.model_dump_json())
