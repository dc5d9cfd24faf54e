"""Tables of judged captions."""

from captioner.evaluation.judgements import read_judgements

TABLE = """image,style,caption,judge,grade,errors
a.jpg,coco,a man rides a horse,1,partly,person
a.jpg,coco,a man rides a horse,2,wrong,person object
b.jpg,,a dog,1,right,
b.jpg,,a dog,2,,
"""


def test_the_mean_of_the_judges_counts(tmp_path) -> None:
    (tmp_path / "judged.csv").write_text(TABLE)
    found = read_judgements([str(tmp_path / "judged.csv")], "flickr8k")
    assert found == {
        "coco": {"a.jpg": {"a man rides a horse": 0.25}},
        "flickr8k": {"b.jpg": {"a dog": 1.0}},
    }


def test_a_neutral_caption_has_no_wrong_sex(tmp_path) -> None:
    (tmp_path / "judged.csv").write_text(TABLE)
    found = read_judgements([str(tmp_path / "judged.csv")], "flickr8k", neutral=True)
    assert found["coco"] == {"a.jpg": {"a person rides a horse": 0.5}}
