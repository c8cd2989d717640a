"""The pipe between the service and a worker."""

import asyncio
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.rewards.frames import (
    HEADER,
    MAX_REPLY_BYTES,
    FrameError,
    describe,
    encode_frame,
    read_frame,
    read_reply,
)


@given(st.lists(st.dictionaries(st.text(), st.text() | st.integers() | st.none())))
def test_frames_come_back(messages):
    stream = io.BytesIO(b"".join(encode_frame(message) for message in messages))
    assert [read_frame(stream) for _ in messages] == messages
    assert read_frame(stream) is None


def test_a_torn_frame_is_the_end():
    assert read_frame(io.BytesIO(encode_frame({"a": 1})[:-1])) is None


@pytest.mark.parametrize("body", [b"{", b"[1]", b"\xff"])
async def test_what_is_no_frame_is_refused(body):
    stream = asyncio.StreamReader()
    stream.feed_data(HEADER.pack(len(body)) + body)
    with pytest.raises(FrameError):
        await read_reply(stream)


async def test_a_length_out_of_step_is_refused_before_it_is_read():
    stream = asyncio.StreamReader()
    stream.feed_data(HEADER.pack(MAX_REPLY_BYTES + 1))
    with pytest.raises(FrameError, match="a reply of"):
        await read_reply(stream)


def test_errors_are_one_short_line():
    text = describe(ValueError("a\nb" + "x" * 10_000))
    assert text.startswith("ValueError: a b")
    assert "\n" not in text
    assert len(text) < 600
