"""Streams in any pieces, the kinds of their chunks, and the numbers of tokens of the chunks."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooflab.bench.load.answers import events, read_answer
from rooflab.bench.load.client import Shot
from rooflab.bench.load.metrics import times_of, token_steps

WANTED = ['{"a": 1}', "two\nlines", "[DONE]"]
STREAM = (
    '\ufeff: ping\r\n\r\nid: 7\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:two\ndata: lines\n\n:\n\n\n\ndata: [DONE]\r\r'
).encode()


def sliced(body: bytes, cuts) -> list[tuple[float, bytes]]:
    bounds = [0, *sorted(set(cuts)), len(body)]
    return [(float(end), body[begin:end]) for begin, end in itertools.pairwise(bounds)]


@given(cuts=st.lists(st.integers(1, len(STREAM) - 1)))
def test_events_do_not_depend_on_the_pieces_and_their_times_are_of_their_last_byte(cuts):
    pieces = sliced(STREAM, cuts)
    found = list(events(pieces))
    assert [data for _, data, _ in found] == WANTED
    ends = [STREAM.index(b"\r\n\r\nevent") + 3, STREAM.index(b"\n\n:") + 2, len(STREAM)]
    assert [time for time, *_ in found] == [min(end for end, _ in pieces if end >= least) for least in ends]


def answer(*lines, status=200, error="", ends=True) -> object:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines] + ["[DONE]"] * ends
    pieces = [(float(place), f"data: {text}\n\n".encode()) for place, text in enumerate(texts, 1)]
    return read_answer(Shot(0, b"", 3, 4, 0.0, 0.5, 9.0, status, pieces, error))


def text(value, reason=None, **more):
    return {"choices": [{"text": value, "finish_reason": reason, **more}]}


def delta(reason=None, **content):
    return {"choices": [{"delta": content, "finish_reason": reason}]}


TWO = {"content": [{"token": "b"}, {"token": "c"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


def test_a_chat_has_a_role_chunk_and_its_usage_a_chunk_without_a_choice():
    found = answer(
        delta(role="assistant", content=""), delta(content="a"), delta(reasoning_content="b"), delta("stop"), USAGE
    )
    assert [chunk.kind for chunk in found.chunks] == ["role", "text", "text", "empty", "usage", "done"]
    assert (found.prompt_tokens, found.output_tokens, found.finish_reason) == (7, 3, "stop")
    assert (found.first_byte_s, found.error) == (1.0, "")


@pytest.mark.parametrize(
    "lines, steps, counted",
    [
        ([text("a"), text("b"), text("c", "stop"), USAGE], [(1, 1), (2, 1), (3, 1)], "one each"),
        # The token that ends the text has none.
        ([text("a"), text("b"), text("", "stop"), text(""), USAGE], [(1, 1), (2, 1)], "one each"),
        ([text("a", "stop", logprobs={"tokens": "x" * n}) for n in (1, 2)], [(1, 1), (2, 1)], "chunks"),
        ([text("a", token_ids=[1]), text("bc", "stop", token_ids=[2, 3]), USAGE], [(1, 1), (2, 2)], "said"),
        ([text("a", logprobs={"tokens": ["a"]}), text("bc", "stop", logprobs=TWO)], [(1, 1), (2, 2)], "said"),
        # One that runs along gives each chunk its difference.
        ([{**text("x", "stop" if total == 9 else None), "usage": {"completion_tokens": total}} for total in (2, 5, 9)],
         [(1, 2), (2, 3), (3, 4)], "said"),
        # One that is zero beside a text, or falls, says nothing.
        ([{**text("x", "stop"), "usage": {"completion_tokens": total}} for total in (0, 0, 3)],
         [(1, 1), (2, 1), (3, 1)], "one each"),
        # A role is no token, though it came with the usage's number of chunks.
        ([delta(role="assistant", content=""), delta(content="a"), delta("stop", content="b"), USAGE],
         [(2, 1), (3, 1)], "one each"),
        # Bundles of unknown size share the rest.
        ([*(text("ab", why) for why in (*[None] * 4, "stop")), {**USAGE, "usage": {"completion_tokens": 9}}],
         [(1, 1), (2, 2), (3, 2), (4, 2), (5, 2)], "spread"),
    ],
)  # fmt: skip
def test_how_many_tokens_a_chunk_has(lines, steps, counted):
    assert token_steps(answer(*lines)) == ([steps], counted)


def of_two(*texts, total=None, each=None):
    """Two answers in turn, and the tokens so far of their own (`each`)."""
    for place, one in enumerate(texts):
        usage = {"usage": {"completion_tokens": each * (place // 2 + 1)}} if each else {}
        yield {**text(one, "stop" if place > len(texts) - 3 else None, index=place % 2), **usage}
    if total:
        yield {**USAGE, "usage": {"completion_tokens": total}}


@pytest.mark.parametrize(
    "lines, steps, counted",
    [
        (of_two("a", "A", "b", "B", total=4), [[(1, 1), (3, 1)], [(2, 1), (4, 1)]], "one each"),
        (of_two("ab", "AB", "cd", "CD", total=10), [[(1, 1), (3, 4)], [(2, 1), (4, 4)]], "spread"),
        # A usage that runs along with each answer, and one that counts them together and says nothing of a chunk.
        (of_two("ab", "AB", "cd", "CD", total=8, each=2), [[(1, 2), (3, 2)], [(2, 2), (4, 2)]], "said"),
        (of_two("a", "A", "b", "B", total=4, each=2), [[(1, 1), (3, 1)], [(2, 1), (4, 1)]], "one each"),
    ],
)
def test_each_of_several_answers_has_gaps_of_its_own(lines, steps, counted):
    """A tenth of a second between chunks of two answers in turn would halve each gap if they were one stream."""
    found = answer(*lines)
    assert (token_steps(found), found.error) == ((steps, counted), "")
    gaps = [2000.0] * (sum(map(len, steps)) - 2)
    assert times_of(found).chunk_gap_ms.tolist() == gaps
    assert answer(text("a", "stop"), text("A", index=1), ends=False).error.startswith("the stream ended with no finish")
