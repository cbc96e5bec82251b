import httpx
import pytest

from loadtest.vocabulary import VocabularyError, token_ids
from tests.loadtest.fake_server import STORY, FakeServer, serving


async def test_tokens_are_those_of_the_servers_tokenizer():
    server = FakeServer(events=STORY, token_ids=[7, 3, 7])
    async with serving(server) as base_url, httpx.AsyncClient(base_url=base_url) as http:
        assert await token_ids(http, "tiny") == [3, 7]


async def test_a_server_that_cannot_tell_is_an_error_of_one_line():
    async with httpx.AsyncClient(base_url="http://127.0.0.1:9") as http:
        with pytest.raises(VocabularyError, match="/tokenize"):
            await token_ids(http, "tiny")
