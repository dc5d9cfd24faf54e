"use strict";
/* The options of the form as query parameters. Empty fields show the model's own values. */
class OptionsForm {
  constructor(form, { fields, search, styles, maxBeam }) {
    this.fields = form.elements;
    for (const field of form.querySelectorAll("[name]")) {
      if (field.type === "number") field.placeholder = search[field.name];
      if (!fields.includes(field.name)) field.closest("label").remove();
    }
    for (const name of ["beam_size", "num_captions"]) this.fields[name].max = maxBeam;
    const option = (style) => element("option", { selected: style === search.style }, style);
    this.fields.style?.append(...styles.map(option));
    this.fields.neutral?.toggleAttribute("checked", search.neutral);
    this.note = form.querySelector("#beam-note");
    this.widened = false; // whether the page set the beam size
    form.addEventListener("change", () => this.adjust());
  }

  get words() {
    return this.fields.words?.value.trim() ?? "";
  }

  /** A list with the field's name and value. It is empty if the field is empty or not on this page. */
  given(name) {
    const field = this.fields[name];
    const value = field?.type === "checkbox" ? `${field.checked}` : (field?.value.trim() ?? "");
    return value === "" ? [] : [[name, value]];
  }

  get valid() {
    return this.fields.beam_size.form.reportValidity();
  }

  /** Parameters for captions of any photo. */
  query() {
    return this.parameters("beam_size", "num_captions", "keywords", "neutral", "style");
  }

  /** Whether the model can explain captions of the user. */
  get explains() {
    return this.fields.words !== undefined;
  }

  /** Parameters that explain a caption, by default the caption in the form; null if it is empty. */
  wordsQuery(words = this.words) {
    if (words === "") return null;
    return this.parameters(["words", words], "style");
  }

  /** Parameters with the values of fields, or with given pairs of name and value. */
  parameters(...names) {
    const given = names.flatMap((name) => (Array.isArray(name) ? [name] : this.given(name)));
    return `${new URLSearchParams([["attention", "true"], ["alternatives", "5"], ...given])}`;
  }

  /** Widen the beam if necessary: it must be at least as large as the number of captions. */
  adjust() {
    const { beam_size: beam, num_captions: captions } = this.fields;
    if (this.widened && document.activeElement !== beam) beam.value = "";
    this.widened = false;
    this.note.textContent = "";
    const wanted = Number(captions.value || captions.placeholder);
    if (Number(beam.value || beam.placeholder) < wanted) {
      beam.value = `${wanted}`;
      this.widened = true;
      this.note.textContent = `The beam size is now ${wanted}, because ${wanted} captions need it.`;
    }
    beam.disabled = captions.disabled = this.words !== "";
  }
}
