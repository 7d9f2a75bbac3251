"""The acoustic model of the AD-PSGD papers: a deep bidirectional LSTM, a linear bottleneck, many
outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


class AcousticModel(nn.Module):
    """`layers` bidirectional LSTMs of `cells` per direction, `bottleneck` linear units (0: none),
    `outputs` scores.

    One nn.LSTM a layer rather than one for all: the same cuDNN kernels (a bidirectional layer
    cannot start before the one below has ended), and dropout that follows torch's generator
    exactly.
    """

    def __init__(
        self,
        inputs: int,
        *,
        layers: int,
        cells: int,
        bottleneck: int,
        outputs: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        widths = [inputs] + [2 * cells] * (layers - 1)
        self.lstms = nn.ModuleList(
            nn.LSTM(width, cells, batch_first=True, bidirectional=True) for width in widths
        )
        self.bottleneck = nn.Linear(2 * cells, bottleneck) if bottleneck else nn.Identity()
        self.output = nn.Linear(bottleneck or 2 * cells, outputs)
        self.dropout = dropout
        self._open_forget_gates(cells)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        """Scores [batch, frames, outputs] (0 past the end) of padded [batch, frames, inputs];
        `lengths` on the CPU.
        """
        packed = pack_padded_sequence(frames, lengths, batch_first=True, enforce_sorted=False)
        for lstm in self.lstms:
            packed, _ = lstm(packed)
            packed = self._drop(packed)
        scores = self.output(self.bottleneck(packed.data))
        padded, _ = pad_packed_sequence(
            packed._replace(data=scores), batch_first=True, total_length=frames.shape[1]
        )
        return padded

    def _drop(self, packed: PackedSequence) -> PackedSequence:
        if not (self.training and self.dropout):
            return packed
        return packed._replace(data=F.dropout(packed.data, self.dropout))

    def _open_forget_gates(self, cells: int) -> None:
        """Biases of the forget gates at 1: gradients reach back from the first step on."""
        with torch.no_grad():
            for name, parameter in self.lstms.named_parameters():
                if "bias_ih" in name:
                    parameter[cells : 2 * cells] = 1.0


def ctc_loss(scores: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
    """CTC per unit of the transcript, averaged over the batch. An utterance too short for its
    text counts as 0.
    """
    log_probabilities = F.log_softmax(scores.float(), dim=-1).transpose(0, 1)
    return F.ctc_loss(log_probabilities, targets, lengths, target_lengths, zero_infinity=True)


def frame_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy averaged over all frames; `labels` is -100 past the end."""
    return F.cross_entropy(scores.float().flatten(0, 1), labels.flatten())
