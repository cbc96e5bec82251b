import json

from research.speed import contexts


def test_every_precision_reads_and_decodes_in_every_turn(tmp_path):
    file = tmp_path / "contexts.json"
    contexts.main(prompts="20,40", tokens=4, repeats=2, json_file=file)
    figures = json.loads(file.read_text())
    assert [row["prompt"] for row in figures["rows"]] == [20, 40]
    for row in figures["rows"]:
        assert list(row["precisions"]) == ["float32", "float16", "bfloat16"]
        assert row["precisions"]["float32"]["prompt_over"] == row["precisions"]["float32"]["decode_over"] == 1
        assert all(
            len(seen["turns"][work]) == 2 for seen in row["precisions"].values() for work in ("prompt", "decode")
        )
