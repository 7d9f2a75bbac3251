"""What goes wrong between ranks, as errors that name who."""


class CommError(RuntimeError):
    """Communication failed; the parameters are as they were before the exchange."""


class LostPeer(CommError):
    """A rank died, was cut off or left; `rank` says which."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank
