"use strict";
/* The file that is sent for a photo: the file itself, or a smaller JPEG of a large photo.

   A phone's photo has 12 megapixels and 4 MB, but the input of the shipped model has only 0.1
   megapixels. The sides of the smaller JPEG are at least twice as long as the sides of the input, so
   the caption rarely changes. */
class Upload {
  static HEAVY = 1e6; // bytes; files up to this size are sent unchanged
  static SIDE = 1536; // pixels of the shorter side of a photo that is sent smaller
  static MAX_SIDE = 8192; // pixels; browsers limit the size of a canvas
  static turn = Promise.resolve(); // photos are decoded one at a time, as 12 megapixels need 48 MB

  /** `{body, converted}` for a SessionPhoto; throws Error in plain words. */
  static async of(photo, { limits, imageSize }) {
    const mine = Upload.turn.then(() => Upload.make(photo, limits, imageSize));
    Upload.turn = mine.catch(() => {});
    const made = await mine;
    if (made.body.size > limits.max_bytes) {
      const [size, limit] = [made.body.size, limits.max_bytes].map(byteCount);
      throw new Error(`This file has ${size}, but the server accepts at most ${limit}. Save a smaller copy.`);
    }
    return made;
  }

  static async make(photo, limits, imageSize) {
    const { file, kind } = photo;
    const original = { body: file, converted: false };
    const foreign = !SERVER_KINDS.includes(kind);
    await photo.load();
    const { naturalWidth: width, naturalHeight: height } = photo.image;
    const heavy = file.size > Math.min(Upload.HEAVY, limits.max_bytes);
    if (!foreign && !heavy && width * height <= limits.max_pixels) return original;
    // Browsers ignore the EXIF orientation of WebP files, which the server applies.
    if (photo.orientation > 1) return original;
    // The browser turns the photo upright and converts its colours to sRGB, as the server would do.
    const bitmap = await createImageBitmap(file, { imageOrientation: "from-image" }).catch(() => null);
    if (bitmap === null) return original; // for example TIFF
    try {
      for (const [side, quality] of [[Upload.SIDE, 0.95], [0, 0.95], [0, 0.8]]) {
        const body = await Upload.jpeg(bitmap, Math.max(side, 2 * imageSize), quality);
        const smaller = body.size < file.size || foreign || width * height > limits.max_pixels;
        if (!smaller) return original;
        if (body.size <= limits.max_bytes) return { body, converted: true };
      }
      return original;
    } finally {
      bitmap.close();
    }
  }

  /** A JPEG file. Its shorter side has `side` pixels, or fewer if the photo has fewer. */
  static jpeg(bitmap, side, quality) {
    const { width, height } = bitmap;
    const fits = Math.min(side / Math.min(width, height), Upload.MAX_SIDE / Math.max(width, height));
    const canvas = paintedOnWhite(bitmap, width, height, Math.min(1, fits));
    return new Promise((resolve, reject) => {
      const problem = "This browser cannot convert this photo. Save it as JPEG.";
      const done = (blob) => (blob ? resolve(blob) : reject(new Error(problem)));
      canvas.toBlob(done, "image/jpeg", quality);
    });
  }
}
