"use strict";
/* The options of the form as query parameters. */
class OptionsForm {
  constructor(form) {
    this.fields = form.elements;
    this.note = form.querySelector("#beam-note");
    this.widened = false; // whether the page set the beam size
    form.addEventListener("change", () => this.adjust());
  }

  get words() {
    return this.fields.words.value.trim();
  }

  get valid() {
    return this.fields.beam_size.form.reportValidity();
  }

  /** Parameters for captions of any photo. */
  query() {
    const parameters = OptionsForm.parameters();
    for (const name of ["beam_size", "num_captions"]) {
      const { value } = this.fields[name];
      if (value !== "") parameters.set(name, value);
    }
    return `${parameters}`;
  }

  /** Parameters that explain the caption in the form; null if it is empty. */
  wordsQuery() {
    if (this.words === "") return null;
    const parameters = OptionsForm.parameters();
    parameters.set("words", this.words);
    return `${parameters}`;
  }

  static parameters() {
    return new URLSearchParams({ attention: "true", alternatives: "5" });
  }

  /** A beam holds at least as many sentences as there are captions; widen it if necessary. */
  adjust() {
    const { beam_size: beam, num_captions: captions, words } = this.fields;
    if (this.widened && document.activeElement !== beam) beam.value = "";
    this.widened = false;
    this.note.textContent = "";
    const wanted = Number(captions.value || captions.placeholder);
    if (Number(beam.value || beam.placeholder) < wanted) {
      beam.value = `${wanted}`;
      this.widened = true;
      this.note.textContent = `The beam size is now ${wanted}, which ${wanted} captions need.`;
    }
    beam.disabled = captions.disabled = words.value.trim() !== "";
  }
}
