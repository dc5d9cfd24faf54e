"use strict";
/* Pictures as the browser decodes them. */

/** A canvas with the picture. Transparent pixels are blended with white, as for the model. */
function paintedOnWhite(picture, width, height, scale) {
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas;
}

/** The <img> of an address; 0 x 0 pixels if the browser does not support its format. */
async function loadedImage(url) {
  const image = new Image();
  image.src = url;
  await image.decode().catch(() => {});
  return image;
}

/** EXIF orientation of a WebP file (browsers ignore it, but the server applies it), or 1. */
async function webpOrientation(file) {
  const view = new DataView(await file.arrayBuffer());
  const name = (at) => String.fromCharCode(...new Uint8Array(view.buffer, at, 4));
  try {
    if (name(0) !== "RIFF" || name(8) !== "WEBP") return 1;
    let chunk = 12;
    while (name(chunk) !== "EXIF") {
      const size = view.getUint32(chunk + 4, true);
      chunk += 8 + size + (size % 2);
    }
    const tiff = chunk + (name(chunk + 8) === "Exif" ? 14 : 8);
    const little = view.getUint16(tiff) === 0x4949;
    const entries = tiff + view.getUint32(tiff + 4, little);
    for (let entry = 0; entry < view.getUint16(entries, little); entry++) {
      const at = entries + 2 + 12 * entry;
      if (view.getUint16(at, little) === 0x0112) return view.getUint16(at + 8, little);
    }
  } catch {
    // end of file: no EXIF
  }
  return 1;
}

/** The reason why the browser's image differs from the captioned image; empty if they are equal. */
function mismatch({ image, orientation, converted }, { width, height }) {
  const { naturalWidth, naturalHeight } = image;
  if (naturalWidth === 0) return "This browser does not support this image format";
  if (converted) return ""; // the server captioned the browser's own image
  const rotated = naturalWidth * height !== naturalHeight * width;
  // With equal aspect ratios, it is unknown whether the browser applied the orientation.
  const unknown = orientation > 1 && (orientation < 5 || width === height);
  return rotated || unknown ? "This browser does not apply this image's EXIF orientation" : "";
}
