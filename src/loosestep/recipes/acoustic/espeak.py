"""Speech synthesis by espeak-ng, in a process of its own: `python espeak.py < jobs.json > speech`.

The library keeps hidden state: the same text sounds a little different the second time. A fresh
process with a fixed seed that is given the same jobs in the same order gives the same samples. It
imports nothing of loosestep, so that it starts quickly.

In:   a JSON list of [text, voice, words per minute, pitch] Out:  the rate (4 bytes, little endian);
then for each job the number of samples, the samples (int16),
      the number of bytes of JSON, and the phonemes as JSON [[first sample, name], ...]
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from pathlib import Path
from typing import Any

_RETRIEVAL = 2
_PHONEME_EVENTS = 0x0001
_DO_NOT_EXIT = 0x8000
_RATE = 1
_PITCH = 3
_UTF8 = 1
_PHONEME_INPUT = 0x100
_EVENT_END = 0
_EVENT_PHONEME = 7


class _EventId(ctypes.Union):
    _fields_ = [("number", ctypes.c_int), ("name", ctypes.c_char_p), ("string", ctypes.c_char * 8)]


class _SpeechEvent(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", _EventId),
    ]


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_SpeechEvent)
)


class Synthesiser:
    """The library, loaded once; `say` returns samples and phonemes."""

    def __init__(self) -> None:
        import espeakng_loader

        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        data = espeakng_loader.get_data_path().encode()
        self.rate = int(
            self._library.espeak_Initialize(_RETRIEVAL, 0, data, _PHONEME_EVENTS | _DO_NOT_EXIT)
        )
        if self.rate <= 0:
            raise RuntimeError(
                f"espeak-ng could not be initialised with its data at {data.decode()}"
            )
        self._variants = Path(data.decode()) / "voices" / "!v"
        self._library.espeak_ng_SetRandSeed.argtypes = [ctypes.c_long]
        self._library.espeak_ng_SetRandSeed(1)  # otherwise the time of day
        self._samples: list[bytes] = []
        self._phonemes: list[tuple[int, str]] = []
        self._callback = _Callback(self._collect)  # kept: ctypes does not
        self._library.espeak_SetSynthCallback(self._callback)
        self._library.espeak_Synth.argtypes = [
            ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_int,
            ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p,
        ]  # fmt: skip

    def say(
        self, text: str, voice: str, speed: int, pitch: int
    ) -> tuple[bytes, list[tuple[int, str]]]:
        self._samples.clear()
        self._phonemes.clear()
        _, plus, variant = voice.partition("+")
        # espeak-ng would quietly speak without it
        if plus and not (self._variants / variant).is_file():
            raise RuntimeError(f"espeak-ng: there is no voice {voice}")
        self._check(
            self._library.espeak_SetVoiceByName(voice.encode()), f"there is no voice {voice}"
        )
        self._library.espeak_SetParameter(_RATE, speed, 0)
        self._library.espeak_SetParameter(_PITCH, pitch, 0)
        data = text.encode() + b"\0"
        status = self._library.espeak_Synth(
            data, len(data), 0, 1, 0, _UTF8 | _PHONEME_INPUT, None, None
        )
        self._check(status, f"{text!r} could not be spoken")
        self._check(self._library.espeak_Synchronize(), f"{text!r} could not be finished")
        return b"".join(self._samples), list(self._phonemes)

    def _collect(self, samples: Any, count: int, events: Any) -> int:
        if samples and count > 0:
            self._samples.append(ctypes.string_at(samples, 2 * count))
        i = 0
        while events[i].type != _EVENT_END:
            if events[i].type == _EVENT_PHONEME:
                self._phonemes.append((events[i].sample, events[i].id.string.decode()))
            i += 1
        return 0

    def _check(self, status: int, message: str) -> None:
        if status != 0:
            raise RuntimeError(f"espeak-ng: {message} (status {status})")


def main() -> None:
    jobs = json.load(sys.stdin)
    synthesiser = Synthesiser()
    out = sys.stdout.buffer
    out.write(struct.pack("<i", synthesiser.rate))
    for text, voice, speed, pitch in jobs:
        samples, phonemes = synthesiser.say(text, voice, speed, pitch)
        events = json.dumps(phonemes).encode()
        out.write(
            struct.pack("<i", len(samples) // 2) + samples + struct.pack("<i", len(events)) + events
        )
    out.flush()


if __name__ == "__main__":
    main()
