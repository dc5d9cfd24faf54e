"use strict";
/* The kind of a chosen file, by its first bytes, so that a wrong file is reported before it is sent. */

/** Kinds that the server reads. All other kinds that the browser can decode are sent as JPEG. */
const SERVER_KINDS = ["JPEG", "PNG", "WebP", "GIF", "BMP", "TIFF"];

/** The kind of a file: one of SERVER_KINDS, HEIC, AVIF, PDF, video or unknown. */
function kindOf(head) {
  const text = (at, count) => String.fromCharCode(...head.subarray(at, at + count));
  if (text(0, 3) === "\xff\xd8\xff") return "JPEG";
  if (text(0, 4) === "\x89PNG") return "PNG";
  if (text(0, 4) === "GIF8") return "GIF";
  if (text(0, 4) === "RIFF" && text(8, 4) === "WEBP") return "WebP";
  if (text(0, 2) === "BM") return "BMP";
  if (["II*\0", "MM\0*", "II+\0", "MM\0+"].includes(text(0, 4))) return "TIFF";
  if (text(0, 64).includes("%PDF-")) return "PDF";
  if (text(4, 4) !== "ftyp") return "unknown";
  const brand = text(8, 4);
  if (/^(hei|hev|mif1|msf1)/.test(brand)) return "HEIC";
  return /^avi[fs]/.test(brand) ? "AVIF" : "video";
}

const PROBLEMS = {
  HEIC:
    "This is a HEIC photo, which this browser cannot convert. Save it as JPEG (on an iPhone, choose " +
    "Settings, Camera, Formats, Most Compatible).",
  AVIF: "This is an AVIF photo, which this browser cannot convert. Save it as JPEG.",
  PDF: "This is a PDF, not a photo. Save its pages as JPEG or PNG.",
  video: "This is a video, not a photo. Save its frames as JPEG or PNG.",
  unknown: "This is not a photo. Choose a JPEG, PNG, WebP, GIF, BMP or TIFF file.",
};

/** `{kind, problem}` of a file; the problem is a sentence, or empty if the file can be captioned. */
async function examine(file) {
  if (file.size === 0) return { kind: "empty", problem: "This file is empty. Copy or download it again." };
  let head;
  try {
    head = new Uint8Array(await file.slice(0, 64).arrayBuffer());
  } catch {
    const problem = "This file cannot be read. If it is a folder, open it and select its photos.";
    return { kind: "unreadable", problem };
  }
  const kind = kindOf(head);
  if (SERVER_KINDS.includes(kind)) return { kind, problem: "" };
  const convertible = kind === "PDF" || kind === "video" ? false : await decodable(file);
  return { kind, problem: convertible ? "" : PROBLEMS[kind] };
}

async function decodable(file) {
  try {
    (await createImageBitmap(file)).close();
    return true;
  } catch {
    return false;
  }
}

/** A number of bytes in words. */
function byteCount(bytes) {
  if (bytes < 1e3) return `${bytes} bytes`;
  return bytes < 1e6 ? `${(bytes / 1e3).toFixed(0)} KB` : `${(bytes / 1e6).toFixed(1)} MB`;
}
