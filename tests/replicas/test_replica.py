from __future__ import annotations

import pytest

from router.replicas.replica import Replica, ServedModel, candidates_of, model_entries
from tests.replicas.work import replica


def test_one_rank_is_the_replica_itself() -> None:
    (only,) = candidates_of(replica("r1"))

    assert (only.id, only.rank, only.capacity_tokens) == ("r1", None, 1600)


def test_ranks_are_candidates_of_their_own() -> None:
    candidates = candidates_of(replica("r1", num_ranks=3))

    assert [(c.id, c.rank) for c in candidates] == [("r1#0", 0), ("r1#1", 1), ("r1#2", 2)]


@pytest.mark.parametrize("sizes", [{"block_size": 16}, {"num_blocks": 100}, {}])
def test_capacity_needs_both_sizes(sizes: dict[str, int]) -> None:
    (only,) = candidates_of(Replica(name="r", url="http://r", **sizes))

    assert only.capacity_tokens is None


def test_refuses_names_that_would_be_ambiguous() -> None:
    with pytest.raises(ValueError, match="'r#1'"):
        Replica(name="r#1", url="http://r")
    with pytest.raises(ValueError, match="non-empty"):
        Replica(name="", url="http://r")
    with pytest.raises(ValueError, match="num_ranks must be >= 1: 0"):
        Replica(name="r", url="http://r", num_ranks=0)


def test_base_model_is_the_one_without_a_parent() -> None:
    models = (ServedModel(id="lora", parent="base"), ServedModel(id="base"))

    assert Replica(name="r", url="http://r", models=models).base_model == "base"
    assert Replica(name="r", url="http://r").base_model == ""


def test_model_entries_are_the_union() -> None:
    first = Replica(
        name="a",
        url="http://a",
        models=(
            ServedModel(id="m", root="/models/m", max_model_len=4096),
            ServedModel(id="lora", root="/loras/l", parent="m"),
        ),
    )
    entries = model_entries([first, replica("b", models=("m", "n"))])

    assert [entry["id"] for entry in entries] == ["m", "lora", "n"]
    assert entries[0]["max_model_len"] == 4096
    assert entries[1] == {
        "id": "lora",
        "object": "model",
        "created": 0,
        "owned_by": "vllm",
        "root": "/loras/l",
        "parent": "m",
        "max_model_len": None,
    }
