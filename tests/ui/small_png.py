"""Pictures of the page as PNG files with a palette: a third of what a browser writes, and the same to the eye."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
import numpy.typing as npt
from playwright.async_api import Page

COLOURS = 128

_DECODE = """async (png) => {
  const picture = await createImageBitmap(await (await fetch(`data:image/png;base64,${png}`)).blob());
  const pen = new OffscreenCanvas(picture.width, picture.height).getContext("2d");
  pen.drawImage(picture, 0, 0);
  const bytes = pen.getImageData(0, 0, picture.width, picture.height).data;
  let text = "";
  for (let at = 0; at < bytes.length; at += 32768) text += String.fromCharCode(...bytes.subarray(at, at + 32768));
  return [picture.width, picture.height, btoa(text)];
}"""


async def shrink(png: bytes, page: Page) -> bytes:
    """Return ``png`` again with at most 128 colours. ``page`` is an open page whose policy lets it decode pictures."""
    width, height, packed = await page.evaluate(_DECODE, base64.b64encode(png).decode())
    pixels = np.frombuffer(base64.b64decode(packed), dtype=np.uint8).reshape(height, width, 4)[:, :, :3]
    palette, indices = with_palette(pixels)
    return encode(palette, indices)


def with_palette(pixels: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return a palette (colours, 3) and for each pixel of ``pixels`` (height, width, 3) its place there.

    The palette grows by the colour that costs most while it is missing: its pixels times their squared distance.
    """
    flat = pixels.reshape(-1, 3).astype(np.uint32)
    keys = flat[:, 0] << 16 | flat[:, 1] << 8 | flat[:, 2]
    exact, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    colours = np.stack([exact >> 16 & 255, exact >> 8 & 255, exact & 255], axis=1).astype(np.int64)
    chosen = [int(counts.argmax())]
    error = ((colours - colours[chosen[0]]) ** 2).sum(axis=1)
    while len(chosen) < COLOURS and error.any():
        chosen.append(int((counts * error).argmax()))
        error = np.minimum(error, ((colours - colours[chosen[-1]]) ** 2).sum(axis=1))
    palette = colours[np.sort(chosen)]
    nearest = ((colours[:, None, :] - palette[None, :, :]) ** 2).sum(axis=2).argmin(axis=1).astype(np.uint8)
    return palette.astype(np.uint8), nearest[inverse].reshape(pixels.shape[:2])


def encode(palette: npt.NDArray[np.uint8], indices: npt.NDArray[np.uint8]) -> bytes:
    """Return a PNG of colour type 3 (RFC 2083): ``indices`` (height, width) into ``palette`` (colours, 3)."""
    height, width = indices.shape
    rows = np.concatenate([np.zeros((height, 1), dtype=np.uint8), indices], axis=1)  # Each row begins with filter 0.
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", palette.tobytes()),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    )
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
