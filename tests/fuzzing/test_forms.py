import threading

from tests.fuzzing.forms import KNOWN, Watch


def test_hostile_grammars_are_answered_or_refused_and_do_not_block_others(server):
    watch = Watch(server.url)
    watcher = threading.Thread(target=watch.look)
    watcher.start()
    try:
        for body in KNOWN:
            asked = {"model": "default", "prompt": "Once", "max_tokens": 20, "n": 2, "seed": 1, **body}
            answer = server.http.post("/v1/completions", json=asked, timeout=300)
            assert answer.status_code in (200, 400), body
    finally:
        watch.is_over = True
        watcher.join()
    assert 0 < watch.worst["livez"] < 10_000
    assert server.complete(max_tokens=2).status_code == 200
