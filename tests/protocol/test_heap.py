import gc
import weakref

from protocol.heap import freeze_heap


class Link:
    """Something that only a collection can free, once it links to itself."""

    def __init__(self) -> None:
        self.me = self


def test_what_was_alive_is_looked_at_no_more_and_what_comes_later_is_still_freed():
    try:
        freeze_heap()
        assert gc.get_freeze_count() > 10_000, "all of the process until now"
        assert len(gc.get_objects(generation=2)) < 100
        seen = weakref.ref(Link())
        gc.collect()
        assert seen() is None
    finally:
        gc.unfreeze()
