/* Photos as inputs of the encoder, as in captioner/data/images.py and preprocessing.py. */

import { resize } from "./resize.js";

/** The part of a photo that the encoder sees, as fractions: left, top, right, bottom. */
export function cropBox(width, height, { resize: how }) {
  if (how === "squash") return [0, 0, 1, 1];
  const side = Math.min(width, height);
  const [x, y] = [side / width / 2, side / height / 2];
  return [0.5 - x, 0.5 - y, 0.5 + x, 0.5 + y];
}

/** Decode a file: upright, colours in sRGB, transparent pixels white.

    Returns {width, height, box, pixels: S x S x 3 bytes in the encoder's channel order}; throws Error. */
export async function readPhoto(file, preprocessing) {
  const bitmap = await createImageBitmap(file, { imageOrientation: "from-image" }).catch(() => null);
  if (bitmap === null) throw new Error("This browser cannot open this photo. Save it as JPEG or PNG.");
  try {
    const { width, height } = bitmap;
    const box = cropBox(width, height, preprocessing);
    return { width, height, box, pixels: encoderInput(width, height, stripsOf(bitmap), box, preprocessing) };
  } finally {
    bitmap.close();
  }
}

/** Rows of a bitmap as RGBA bytes, read in strips because browsers limit the size of a canvas. */
function stripsOf(bitmap) {
  let canvas = null;
  return (top, bottom) => {
    const { width } = bitmap;
    const height = bottom - top;
    canvas ??= new OffscreenCanvas(width, height);
    const context = canvas.getContext("2d", { willReadFrequently: true, colorSpace: "srgb" });
    context.imageSmoothingEnabled = false;
    context.fillStyle = "#fff";
    context.fillRect(0, 0, width, height);
    context.drawImage(bitmap, 0, top, width, height, 0, 0, width, height);
    return context.getImageData(0, 0, width, height).data;
  };
}

/** Resize a part of a photo for the encoder, to S x S x 3 bytes; see `readPhoto`. */
export function encoderInput(width, height, rows, box, { image_size: size, channel_order: order }) {
  const [left, top, right, bottom] = box;
  const pixels = resize(width, height, rows, size, [left * width, top * height, right * width, bottom * height]);
  for (let i = 0; order === "BGR" && i < pixels.length; i += 3) {
    [pixels[i], pixels[i + 2]] = [pixels[i + 2], pixels[i]];
  }
  return pixels;
}
