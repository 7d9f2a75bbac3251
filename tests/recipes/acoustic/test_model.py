from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from loosestep.recipes.acoustic.decode import greedy
from loosestep.recipes.acoustic.model import AcousticModel, ctc_loss, frame_loss


def a_model(**changes: float) -> AcousticModel:
    torch.manual_seed(0)
    return AcousticModel(6, **{"layers": 2, "cells": 5, "bottleneck": 4, "outputs": 7, **changes})  # type: ignore[arg-type]


def test_padding_changes_nothing() -> None:
    model = a_model()
    frames = torch.randn(3, 9, 6)
    lengths = torch.tensor([4, 9, 7])
    padded = model(frames, lengths)
    assert padded.shape == (3, 9, 7)
    for i, length in enumerate(lengths.tolist()):
        alone = model(frames[i : i + 1, :length], torch.tensor([length]))
        torch.testing.assert_close(padded[i : i + 1, :length], alone)
        assert bool((padded[i, length:] == 0).all())


def test_both_directions_are_seen() -> None:
    model = a_model()
    frames = torch.randn(1, 9, 6, requires_grad=True)
    model(frames, torch.tensor([9]))[0, 4].sum().backward()
    assert frames.grad is not None
    assert bool((frames.grad[0, 0] != 0).any())
    assert bool((frames.grad[0, 8] != 0).any())


def test_the_papers_model_has_its_published_size() -> None:
    with torch.device("meta"):
        model = AcousticModel(260, layers=6, cells=512, bottleneck=256, outputs=32000)
    widths = [lstm.input_size for lstm in model.lstms]  # type: ignore[union-attr]
    assert widths == [260] + [1024] * 5
    per_layer = [2 * (4 * 512 * (width + 512) + 2 * 4 * 512) for width in widths]
    expected = sum(per_layer) + 1024 * 256 + 256 + 256 * 32000 + 32000
    assert sum(p.numel() for p in model.parameters()) == expected  # 43 million


def test_forget_gates_begin_open() -> None:
    for lstm in a_model().lstms:
        assert bool((lstm.bias_ih_l0[5:10] == 1).all())  # type: ignore[index, operator, union-attr]
        assert bool((lstm.bias_ih_l0_reverse[5:10] == 1).all())  # type: ignore[index, operator, union-attr]


def test_dropout_is_for_training_only_and_follows_the_generator() -> None:
    model = a_model(dropout=0.5)
    inputs = torch.randn(2, 5, 6), torch.tensor([5, 3])

    def seeded() -> torch.Tensor:
        torch.manual_seed(3)
        return model(*inputs)

    assert torch.equal(seeded(), seeded())
    assert not torch.equal(seeded(), model(*inputs))
    model.eval()
    assert torch.equal(model(*inputs), model(*inputs))


def test_frame_loss_counts_real_frames_only() -> None:
    scores = torch.randn(2, 4, 3)
    labels = torch.tensor([[0, 1, 2, 1], [2, 0, -100, -100]])
    real = torch.cat([scores[0], scores[1, :2]])
    torch.testing.assert_close(
        frame_loss(scores, labels), F.cross_entropy(real, torch.tensor([0, 1, 2, 1, 2, 0]))
    )


def test_ctc_learns_one_batch_by_heart() -> None:
    model = a_model(cells=16, bottleneck=0)
    frames = torch.randn(2, 12, 6)
    lengths = torch.tensor([12, 8])
    targets = torch.tensor([1, 2, 2, 3, 6, 5])
    target_lengths = torch.tensor([4, 2])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    first = ctc_loss(model(frames, lengths), lengths, targets, target_lengths).item()
    for _ in range(80):
        optimizer.zero_grad()
        loss = ctc_loss(model(frames, lengths), lengths, targets, target_lengths)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2 * first
    assert greedy(model(frames, lengths), lengths) == [[1, 2, 2, 3], [6, 5]]


def test_an_utterance_too_short_for_its_text_gives_no_infinite_loss() -> None:
    loss = ctc_loss(
        torch.randn(1, 2, 4), torch.tensor([2]), torch.tensor([1, 2, 3]), torch.tensor([3])
    )
    assert float(loss) == pytest.approx(0.0)
