from server.replicas.pool import by_load

LOADS = {"a": 2, "b": 0, "c": 1}


def test_the_least_loaded_replica_comes_first():
    assert by_load(LOADS, ()) == ["b", "c", "a"]
    assert {by_load({"a": 1, "b": 1}, ())[0] for _ in range(50)} == {"a", "b"}


def test_excluded_replicas_are_left_out_unless_no_others_are_left():
    assert by_load(LOADS, ("b", "gone")) == ["c", "a"]
    assert by_load(LOADS, LOADS) == ["b", "c", "a"]
