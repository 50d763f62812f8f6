"""Sources that contradict each other: the first holds, and what is wrong with the other names both."""

from __future__ import annotations

import pytest

from kvcache_otel.events.agreement import agree
from kvcache_otel.events.source import parse

A = "pod=tcp://h:1"


@pytest.mark.parametrize(
    ("first", "second", "wrong"),
    [
        (A, A, "source 'pod' is there twice at tcp://h:1, in the same words"),
        (
            f"{A}?topic=a",
            f"{A}?engine=vllm",
            "source 'pod' is there twice at tcp://h:1, the second time with engine=vllm where it had engine=auto, "
            "topic= where it had topic=a",
        ),
        (
            f"{A}?engine=vllm",
            "pod=tcp://h:2?engine=sglang",
            "source 'pod' at tcp://h:2 has engine=sglang, and at tcp://h:1 engine=vllm: sources of one name are one "
            "worker",
        ),
        (
            f"{A}?block_size=16",
            "pod=tcp://h:2?block_size=32",
            "source 'pod' at tcp://h:2 has block_size=32, and at tcp://h:1 block_size=16: sources of one name are one "
            "worker",
        ),
        (
            f"{A}?clears=all",
            "pod=tcp://h:2?clears=device",
            "source 'pod' at tcp://h:2 has clears=device, and at tcp://h:1 clears=all: sources of one name are one "
            "worker",
        ),
        (
            "tcp://h:1",
            "tcp://h:1?topic=x",
            "source 'tcp://h:1' is there twice at tcp://h:1, the second time with topic=x",
        ),
        ("p=dns+tcp://h:1", "p=dns+tcp://h:1", "source 'p' is there twice at dns+tcp://h:1, in the same words"),
    ],
)
def test_what_contradicts(first: str, second: str, wrong: str) -> None:
    others = [parse("other=tcp://h:1?engine=sglang"), parse("last=tcp://h:9?block_size=7")]
    held, [said] = agree([parse(first), others[0], parse(second), others[1]])
    assert held == [parse(first), *others]
    assert said.startswith(wrong)
    assert "left out" not in said, "of arguments it is not: the command ends"


def test_what_one_says_holds_for_all_of_its_name_whichever_it_is() -> None:
    texts = [A, "pod=tcp://h:2?engine=vllm", "pod=tcp://h:3?block_size=16", "other=tcp://h:1"]
    held, wrong = agree(map(parse, texts))
    assert not wrong
    assert [(source.engine, source.block_size) for source in held] == [("vllm", 16)] * 3 + [("auto", None)]


def test_one_that_is_left_out_says_nothing_for_the_others() -> None:
    texts = [f"{A}?engine=vllm", "pod=tcp://h:2?engine=sglang&block_size=7", "pod=tcp://h:3?block_size=16"]
    held, wrong = agree(map(parse, texts))
    assert [source.endpoint for source in held] == ["tcp://h:1", "tcp://h:3"]
    assert {(source.engine, source.block_size) for source in held} == {("vllm", 16)}
    assert len(wrong) == 1
