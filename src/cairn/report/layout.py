"""The layout of a job's picture: columns from left to right, without overlaps.

A column holds *blocks*: sources, transforms, or the chains of a level. A chain is a tree: each
box has the boxes that it feeds to its right. A link that leaves a chain has a row up to the
chain's right side, and a link that passes a column has a row there: no line crosses a box.

Always true here:
- blocks of a column do not overlap, and neither do the boxes of a block;
- a link goes to a column further right, or back (then it runs below everything).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

GAP_Y = 22
"""Between blocks."""
ROW_GAP = 12
"""Between boxes of a block."""
CHAIN_GAP_X = 44
BEND_X = 84
"""Between columns, beside the labels: for lines to bend and go up and down."""
BARE_X = 56
"""The same where no line that ends there has a label."""
EXIT_X = 26
"""From a box to where the row of a link that leaves begins."""
PAD = 12
"""Between a chain and its frame."""
ROW = 18
"""The height of a link's row."""


@dataclass
class Box:
    """A node of the graph, with its size; the layout sets its place."""

    id: str
    width: float
    height: float
    x: float = 0.0
    y: float = 0.0

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


@dataclass
class Link:
    """Rows on their way from one box to another."""

    source: str
    target: str
    inlet: int
    """Links into the same inlet arrive at the same point."""
    start_width: float = 0.0
    """Room for a label at its start."""
    end_width: float = 0.0
    """Room for a label at its end."""
    is_back: bool = False
    points: list[tuple[float, float]] = field(default_factory=list)
    """From the source to the target. Found here."""


@dataclass
class Tree:
    """A box of a chain with what it feeds; without a box it is the row of a link that leaves."""

    box: Box | None
    followers: list[Tree] = field(default_factory=list)
    link: Link | None = None
    """The one that leaves in this row, or that leads to the box inside the chain."""
    middle: float = 0.0

    @property
    def own_height(self) -> float:
        return ROW if self.box is None else self.box.height

    def height(self) -> float:
        return max(self.own_height, _stack_height(self.followers))

    def all(self) -> Iterator[Tree]:
        yield self
        for follower in self.followers:
            yield from follower.all()


def _stack_height(trees: Sequence[Tree]) -> float:
    return sum(t.height() for t in trees) + ROW_GAP * max(0, len(trees) - 1)


@dataclass
class Block:
    """A chain, or the row of a link that passes by."""

    tree: Tree
    is_framed: bool = False
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0

    @property
    def ids(self) -> set[str]:
        return {tree.box.id for tree in self.tree.all() if tree.box is not None}

    @property
    def pad(self) -> float:
        return PAD if self.is_framed else 0.0

    @property
    def height(self) -> float:
        return self.tree.height() + 2 * self.pad

    @property
    def right(self) -> float:
        return self.x + self.width


@dataclass
class Column:
    """The blocks of one band."""

    title: str
    blocks: list[Block]
    x: float = 0.0
    width: float = 0.0

    @property
    def right(self) -> float:
        return self.x + self.width


class Layout:
    """The places of all columns, blocks, boxes and links."""

    def __init__(
        self, columns: Sequence[Column], links: Sequence[Link], *, left: float, top: float
    ) -> None:
        self.columns = columns
        self.links = links
        self.top = top
        self._column_of = {
            id: index
            for index, column in enumerate(columns)
            for block in column.blocks
            for id in block.ids
        }
        self._rows: list[tuple[Link, Block]] = []
        """What passes by, from left to right for each link."""
        for link in links:
            for index in range(self._column_of[link.source] + 1, self._column_of[link.target]):
                block = Block(Tree(None, link=link))
                columns[index].blocks.append(block)
                self._rows.append((link, block))
        trees = [tree for column in columns for block in column.blocks for tree in block.tree.all()]
        self._boxes = {tree.box.id: tree.box for tree in trees if tree.box is not None}
        self._across(left)
        self._place(columns[0].blocks, [None] * len(columns[0].blocks))
        for column in columns[1:]:
            self._settle(column, self._before)
        self._settle(columns[0], self._after)
        for link in links:
            link.points = [*self._exit(link), *self._passing(link), self._entry(link)]

    @property
    def bottom(self) -> float:
        return max(block.y + block.height for column in self.columns for block in column.blocks)

    # From left to right

    def _across(self, x: float) -> None:
        for index, column in enumerate(self.columns):
            ending = [
                link
                for link in self.links
                if self._column_of[link.target] == index != self._column_of[link.source]
                or (link.is_back and self._column_of[link.target] == index)
            ]
            room = max((link.end_width for link in ending), default=0.0)
            room += 10 * sum(link.is_back for link in ending)
            if index:
                x += room + BEND_X if room else BARE_X
            elif ending:
                x += room + 40.0
            column.x = x
            for block in column.blocks:
                block.x = x
                block.width = _width(block.tree, x + block.pad) - x + block.pad
            column.width = max((b.width for b in column.blocks), default=0.0)
            for block in column.blocks:
                if block.tree.box is None:
                    block.width = column.width
            x += column.width

    # From top to bottom

    def _settle(self, column: Column, ys_of: Callable[[Block], list[float]]) -> None:
        """Each block beside what it is linked with, as far as there is room."""
        found = [(block, ys_of(block)) for block in column.blocks]
        wanted = [
            (sum(ys) / len(ys) - block.height / 2 if ys else None, block) for block, ys in found
        ]
        wanted.sort(key=lambda each: self.top if each[0] is None else each[0])
        column.blocks[:] = [block for _, block in wanted]
        self._place(column.blocks, [y for y, _ in wanted])

    def _before(self, block: Block) -> list[float]:
        """Return the heights of incoming links in the column before."""
        if block.tree.box is None:
            (link,) = (link for link, row in self._rows if row is block)
            before = [row for other, row in self._rows if other is link]
            at = before.index(block)
            return [before[at - 1].tree.middle if at else self._exit(link)[-1][1]]
        ids = block.ids
        return [
            (self._passing(link) or self._exit(link))[-1][1]
            for link in self.links
            if link.target in ids and link.source not in ids and not link.is_back
        ]

    def _after(self, block: Block) -> list[float]:
        """Return the heights of outgoing links in the column after."""
        return [
            (*self._passing(link), self._entry(link))[0][1]
            for link in self.links
            if link.source in block.ids
        ]

    def _place(self, blocks: Sequence[Block], wanted: Sequence[float | None]) -> None:
        ys: list[float] = []
        y = self.top
        for block, want in zip(blocks, wanted, strict=True):
            y = max(y, self.top if want is None else want)
            ys.append(y)
            y += block.height + GAP_Y
        # Pushed down by those above: all move back up together.
        pushed = [y - want for y, want in zip(ys, wanted, strict=True) if want is not None]
        back = min(sum(pushed) / len(pushed), ys[0] - self.top) if pushed else 0.0
        for block, y in zip(blocks, ys, strict=True):
            block.y = y - max(0.0, back)
            _down(block.tree, block.y + block.pad)

    # Links

    def _exit(self, link: Link) -> list[tuple[float, float]]:
        """Out of the box, and level to where its column ends."""
        box = self._boxes[link.source]
        column = self.columns[self._column_of[link.source]]
        block = next(block for block in column.blocks if link.source in block.ids)
        row = next((tree for tree in block.tree.all() if tree.link is link), None)
        assert row is not None, "a link begins in the chain of its source"
        start = (box.right, min(max(row.middle, box.y + 8), box.y + box.height - 8))
        if row.box is not None:
            return [start]
        return [start, (box.right + EXIT_X, row.middle), (column.right, row.middle)]

    def _passing(self, link: Link) -> list[tuple[float, float]]:
        rows = [block for other, block in self._rows if other is link]
        return [(x, row.tree.middle) for row in rows for x in (row.x, row.right)]

    def _entry(self, link: Link) -> tuple[float, float]:
        """On the left of its box: a point for each inlet, from top down."""
        box = self._boxes[link.target]
        inlets = sorted({each.inlet for each in self.links if each.target == link.target})
        step = min(26.0, (box.height - 16) / len(inlets))
        return box.x, box.middle + (inlets.index(link.inlet) - (len(inlets) - 1) / 2) * step


def _width(tree: Tree, x: float) -> float:
    """Give a chain its places from left to right; where it ends."""
    if tree.box is None:
        return x + (tree.link.start_width if tree.link is not None else 0.0)
    tree.box.x = x
    end = tree.box.right
    labels = [f.link.start_width for f in tree.followers if f.link is not None and f.box]
    gap = max(CHAIN_GAP_X, max(labels, default=0.0) + 24)
    for follower in tree.followers:
        end = max(end, _width(follower, tree.box.right + (gap if follower.box else EXIT_X)))
    return end


def _down(tree: Tree, y: float) -> None:
    """Give a chain its places from top to bottom."""
    height = tree.height()
    tree.middle = y + height / 2
    if tree.box is not None:
        tree.box.y = tree.middle - tree.box.height / 2
    below = y + (height - _stack_height(tree.followers)) / 2
    for follower in tree.followers:
        _down(follower, below)
        below += follower.height() + ROW_GAP
