"""What a kill -9 left half-done, number by number: both ends of an edge write down the pairs that
were open then.

A pair is applied on both ends or on neither, unless one of them dies. Of a survivor's open pairs
with the dead rank

    unanswered   begun by the survivor      applied by the dead rank alone if it is in that one's cache
    unconfirmed  applied by the survivor    applied by it alone if with the dead rank it still pends
"""

import numpy as np


def write(folder, rank, peer, edge):
    """This end's open pairs with one peer: the weight, then the value."""
    pairs = {
        f"{where} {chunk} {q}": np.append(pair.weight, pair.buffer.value)
        for chunk, state in edge._chunks.items()
        for where, held in (("pend", state.pend), ("cache", state.cache))
        for q, pair in held.items()
    }
    np.savez(folder / f"{rank}-{peer}.npz", **pairs)


def write_will(folder, courier):
    """Everything a rank leaves that dies now: its shadow, which is its last snapshot, and its
    ends of all edges.
    """
    np.save(folder / f"{courier.rank}-shadow.npy", courier.shadow.flat())
    for peer, link in courier.links.items():
        write(folder, courier.rank, peer, link.edge)


def keep(folder, courier, peer):
    """Have this rank's end of an edge written down when it is dropped."""
    edge = courier.links[peer].edge
    drop = edge.drop

    def written():
        write(folder, courier.rank, peer, edge)
        return drop()

    edge.drop = written


def last_snapshot(folder, rank):
    return np.load(folder / f"{rank}-shadow.npy")


def one_sided(folder, dead, survivor):
    """{(chunk, q): what it moved} for the pairs that only one of both has applied."""
    moved = {}
    with (
        np.load(folder / f"{dead}-{survivor}.npz") as theirs,
        np.load(folder / f"{survivor}-{dead}.npz") as ours,
    ):
        for name, mine in ours.items():
            where, chunk, q = name.split()
            other = f"{'cache' if where == 'pend' else 'pend'} {chunk} {q}"
            if other in theirs:
                applied, begun = (theirs[other], mine) if where == "pend" else (mine, theirs[other])
                moved[int(chunk), int(q)] = applied[0] * (begun[1:] - applied[1:])
    return moved
