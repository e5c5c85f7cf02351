from cairn.storage.files import SegmentReader, open_segment

RowsReader = SegmentReader


class _C:
    def __init__(self, r):
        self.r = r

    def __enter__(self):
        return self.r

    def __exit__(self, *a):
        pass

    def __getattr__(self, n):
        return getattr(self.r, n)


def open_rows(store, ref, scratch):
    return _C(open_segment(store, ref))
