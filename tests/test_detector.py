"""ObjectDetector: torchvision's boxes, from its eager networks to a column of Spark's."""

import functools
import io
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from conftest import PLAIN, Corner, Pooled, encoded, picture
from PIL import Image, ImageOps
from torch import nn
from torchvision.models import detection as zoo
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.ops import MultiScaleRoIAlign
from torchvision.transforms.functional import to_tensor

import gpuml
from gpuml import (
    DeviceMemoryError,
    ImageClassifier,
    ImageFeaturizer,
    ModelError,
    ObjectDetector,
    ParamError,
    save_detector,
    save_model,
)
from gpuml.cli import main
from gpuml.models import sources, store
from gpuml.models.cards import DetectionCard
from gpuml.models.detection import _DefaultBoxes
from gpuml.models.detection_sources import resolve
from gpuml.models.export import jit
from gpuml.models.file import load, read_card
from gpuml.spec import Spec
from gpuml.worker import passes
from gpuml.worker.cache import Network
from gpuml.worker.detector import Boxes, Detector

IMAGES = Path(__file__).parents[1] / "examples" / "images"
CPU = torch.device("cpu")
LABELS = ["background", "ant", "bee", "cat"]
FASTER, SSD = "fasterrcnn_mobilenet_v3_large_320_fpn", "ssdlite320_mobilenet_v3_large"

#: What the random networks below are asked for: some give no score over a half.
THRESHOLD = 0.25


# --- networks and pictures --------------------------------------------------------------------------------------------


def network(name):
    """A network of the zoo with seeded weights, calibrated and sharpened: many boxes, of scores far apart."""
    torch.manual_seed(0)
    net = torchvision.models.get_model(
        name, weights=None, weights_backbone=None, num_classes=4,
        **{"box_detections_per_img" if name == FASTER else "detections_per_img": 60},
    )  # fmt: skip
    norms = [part for part in net.modules() if isinstance(part, nn.BatchNorm2d)]
    net.eval()
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    with torch.no_grad():
        net([to_tensor(opened(name)) for name in ("astronaut.jpg", "coffee.jpg")])
        net.eval()
        if name == FASTER:
            for layer in (net.rpn.head.cls_logits, net.rpn.head.bbox_pred, net.roi_heads.box_predictor.cls_score):
                layer.weight.mul_(10)
            net.roi_heads.box_predictor.bbox_pred.weight.mul_(5)
        else:
            for head, factor in ((net.head.classification_head, 3), (net.head.regression_head, 10)):
                for layer in head.module_list:
                    layer[1].weight.mul_(factor)
    return net


def opened(name):
    return Image.open(IMAGES / name).convert("RGB")


def file_of(image, kind="PNG", orientation=0, **options):
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    buffer = io.BytesIO()
    image.save(buffer, kind, exif=exif, **options)
    return buffer.getvalue()


def photographs():
    """Ten files of different sizes, orientations and modes."""
    rocket, flower, temple = opened("rocket.jpg"), opened("flower.jpg"), opened("temple.jpg")
    return [
        (IMAGES / "coffee.jpg").read_bytes(),
        (IMAGES / "camera.png").read_bytes(),
        (IMAGES / "cmyk.jpg").read_bytes(),
        (IMAGES / "rotated.jpg").read_bytes(),
        file_of(flower.crop((100, 50, 400, 250))),
        file_of(rocket, "JPEG", orientation=6, quality=90),
        file_of(rocket.crop((0, 0, 500, 300)), "JPEG", orientation=5, quality=90),
        file_of(rocket.rotate(90, expand=True)),
        file_of(temple.convert("L"), "JPEG", quality=90),
        file_of(opened("astronaut.jpg").resize((200, 333)), orientation=3),
    ]


def upright(data):
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")


def eager(net, files, threshold=THRESHOLD):
    """What torchvision's own network gives, one picture at a time."""
    found = []
    with torch.inference_mode():
        for data in files:
            made = net([to_tensor(upright(data))])[0]
            found.append({key: value[made["scores"] >= threshold].numpy() for key, value in made.items()})
    return found


@pytest.fixture(scope="module")
def files():
    return photographs()


@pytest.fixture(scope="module")
def made(tmp_path_factory, files):
    """By name: the network's file, and its eager boxes of the photographs; each network is built once."""
    folder = tmp_path_factory.mktemp("detectors")

    @functools.cache
    def of(name):
        net = network(name)
        save_detector(net, folder / f"{name}.pt2", LABELS)
        return folder / f"{name}.pt2", eager(net, files)

    return of


def assert_equal(rows, expected):
    """Boxes within half a pixel, of 20 different ones at least in every picture."""
    assert len(rows) == len(expected)
    for row, wanted in zip(rows, expected, strict=True):
        corners = np.array([[box[key] for key in ("x1", "y1", "x2", "y2")] for box in row])
        assert len(row) >= 20
        assert len(np.unique(corners.round(), axis=0)) >= 20
        np.testing.assert_allclose(corners, wanted["boxes"], rtol=0, atol=0.5)
        # Sums in another order, as on another number of threads, move a score by 3e-4: the heads are scaled up.
        np.testing.assert_allclose([box["score"] for box in row], wanted["scores"], rtol=0, atol=1e-3)
        assert [box["label"] for box in row] == [LABELS[number] for number in wanted["labels"]]


# --- torchvision's boxes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [FASTER, SSD])
def test_boxes_are_those_of_the_eager_network_for_pictures_of_all_kinds(name, made, files):
    path, expected = made(name)
    given = ObjectDetector(model=str(path), scoreThreshold=THRESHOLD).predict(files)
    assert given.detectionsError.tolist() == [None] * 10
    assert_equal(given.detections, expected)
    assert len({tuple(found["boxes"][0]) for found in expected}) == 10


def test_boxes_do_not_depend_on_the_batch(made, files):
    """torchvision pads a batch to its largest picture, and finds other boxes in the others."""
    path, expected = made(FASTER)
    given = ObjectDetector(model=str(path), scoreThreshold=THRESHOLD, batchSize=10).predict([*files[:3], files[0]])
    assert_equal(given.detections, [*expected[:3], expected[0]])


def test_the_threshold_leaves_out_what_scores_less(made, files):
    path, expected = made(SSD)
    stage = ObjectDetector(model=str(path), scoreThreshold=0.9)
    given = stage.predict(files[:3]).detections
    wanted = [int((found["scores"] >= np.float32(0.9)).sum()) for found in expected[:3]]
    assert [len(row) for row in given] == wanted
    assert 0 < sum(wanted) < 180
    assert stage.setScoreThreshold(1).predict(files[:1]).detections[0] == []


def backbone():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, 4, 1), nn.ReLU(), nn.Conv2d(16, 256, 3, 4, 1), nn.ReLU())
    net.out_channels = 256
    return net


def small(kind):
    """One of each of torchvision's architectures, on a backbone of two layers."""
    anchors = AnchorGenerator(((16, 32, 64),), ((0.5, 1.0, 2.0),))
    sizes = {"min_size": 64, "max_size": 96}
    if "RCNN" in kind:
        sizes["box_detections_per_img"] = 20
    pool = {"box_roi_pool": MultiScaleRoIAlign(["0"], 7, 2), "rpn_anchor_generator": anchors}
    if kind == "FasterRCNN":
        return zoo.FasterRCNN(backbone(), 4, **sizes, **pool)
    if kind == "MaskRCNN":
        return zoo.MaskRCNN(backbone(), 4, **sizes, **pool, mask_roi_pool=MultiScaleRoIAlign(["0"], 14, 2))
    if kind == "KeypointRCNN":
        heads = {
            "keypoint_head": zoo.keypoint_rcnn.KeypointRCNNHeads(256, (8,)),
            "keypoint_predictor": zoo.keypoint_rcnn.KeypointRCNNPredictor(8, 17),
        }
        return zoo.KeypointRCNN(
            backbone(), 4, **sizes, **pool, **heads, keypoint_roi_pool=MultiScaleRoIAlign(["0"], 14, 2)
        )
    if kind == "RetinaNet":
        return zoo.RetinaNet(backbone(), 4, **sizes, anchor_generator=anchors, score_thresh=0.001)
    if kind == "FCOS":
        anchors = AnchorGenerator(((16,),), ((1.0,),))
        return zoo.FCOS(backbone(), 4, **sizes, anchor_generator=anchors, score_thresh=0.001)
    boxes = DefaultBoxGenerator([[2, 3]])
    return zoo.ssd.SSD(backbone(), boxes, (96, 96), 4, head=zoo.ssd.SSDHead([256], boxes.num_anchors_per_location(), 4))


@pytest.mark.parametrize("kind", ["FasterRCNN", "MaskRCNN", "KeypointRCNN", "RetinaNet", "FCOS", "SSD"])
def test_each_architecture_becomes_a_file_that_gives_its_boxes_and_nothing_else(kind, tmp_path):
    net = small(kind).eval()
    save_detector(net, tmp_path / "net.pt2")
    forward, card = load(tmp_path / "net.pt2", CPU)
    assert card == DetectionCard()
    pictures = [to_tensor(picture(seed, width, 90)) for seed, width in ((0, 120), (1, 70))]
    with torch.inference_mode():
        given, expected = forward(pictures), net(pictures)
    for found, wanted in zip(given, expected, strict=True):
        assert set(found) == {"boxes", "labels", "scores"}
        assert len(found["boxes"]) > 5
        for key, value in found.items():
            torch.testing.assert_close(value, wanted[key])


@pytest.mark.parametrize("steps", [None, [32, 48]])
def test_default_boxes_are_torchvisions_made_where_the_tensors_of_the_file_lie(steps):
    """torch.jit.load takes the tensors to the GPU; here it is the device of no memory."""
    boxes = DefaultBoxGenerator([[2], [2, 3]], steps=steps)
    arguments = {"grid_sizes": [[3, 5], [2, 2]], "image_size": [96, 120], "dtype": torch.float32}
    wanted = boxes._grid_default_boxes(**arguments)
    boxes.__class__ = _DefaultBoxes
    assert torch.equal(boxes._grid_default_boxes(**arguments), wanted)
    boxes._wh_pairs = [pairs.to("meta") for pairs in boxes._wh_pairs]
    assert boxes._grid_default_boxes(**arguments).is_meta


# --- rows -------------------------------------------------------------------------------------------------------------


def runner(forward, *, batch=4, threads=2, threshold=0.5):
    network = Network(forward, DetectionCard(), CPU, "float32")
    return Detector(network, Spec("0" * 64, batch_size=batch, score_threshold=threshold), threads)


def detections(*boxes):
    """What a network gives for one picture: (x1, score) each."""
    corners = torch.tensor([[float(x), 0, x + 1, 1] for x, _ in boxes]).reshape(-1, 4)
    return {
        "boxes": corners,
        "labels": torch.arange(len(boxes)),
        "scores": torch.tensor([float(score) for _, score in boxes]),
    }


def widths(pictures):
    """A network that finds one object, as far to the right as the picture is wide."""
    return [detections((x.shape[2], 0.9)) for x in pictures]


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_every_row_keeps_its_place(batch, threads):
    rows = [encoded(0, width=20 + i % 5) if i % 3 else (None, b"junk", b"")[i % 9 // 3] for i in range(20)]
    found = runner(widths, batch=batch, threads=threads).run(rows)
    for i, row in enumerate(found):
        if i % 3:
            assert row.corners[:, 0].tolist() == [20 + i % 5]
        else:
            assert row.split(":")[0] == ("null_input", "not_image", "empty")[i % 9 // 3]


def test_pictures_reach_the_network_as_to_tensor_makes_them():
    seen = []
    runner(lambda pictures: seen.extend(pictures) or widths(pictures)).run([encoded(3)])
    assert torch.equal(seen[0], to_tensor(picture(3)))
    assert seen[0].is_contiguous()


def test_boxes_are_sorted_by_score_and_an_image_without_any_has_none():
    given = iter([[detections((1, 0.6), (2, 0.9), (3, 0.4), (4, 0.9))], [detections()]])
    first, second = runner(lambda pictures: next(given), batch=1).run([encoded(0), encoded(1)])
    assert (first.corners[:, 0].tolist(), first.labels.tolist()) == ([2, 4, 1], [1, 3, 0])
    assert isinstance(second, Boxes)
    assert second.corners.shape == (0, 4)


def test_out_of_memory_halves_the_batch(caplog):
    sizes = []

    def forward(pictures):
        sizes.append(len(pictures))
        if len(pictures) > 2:
            raise torch.OutOfMemoryError("no")
        return widths(pictures)

    found = runner(forward, batch=8).run([encoded(i, width=20 + i // 8) for i in range(16)])
    assert [row.corners[0, 0] for row in found] == [20] * 8 + [21] * 8
    assert sizes == [8, 4, 2, 2, 2, 2, 2, 2, 2, 2]
    assert "ran out of memory at 8 rows" in caplog.text


def test_out_of_memory_within_torchscript_is_told_by_the_allocators_count(monkeypatch):
    failures = []
    monkeypatch.setattr(passes, "_failed_allocations", lambda device: len(failures))

    def forward(pictures):
        if len(pictures) > 1:
            failures.append(len(pictures))
            raise RuntimeError("as TorchScript's interpreter says it")
        return widths(pictures)

    found = runner(forward).run([encoded(0)] * 4)
    assert [row.corners[0, 0] for row in found] == [60] * 4
    assert failures == [4, 2]


def test_one_picture_that_does_not_fit_fails_the_task():
    def forward(pictures):
        raise torch.OutOfMemoryError("no")

    with pytest.raises(DeviceMemoryError, match="batchSize=4"):
        runner(forward).run([encoded(0)])


def test_nan_is_the_reason_of_its_row_alone():
    def forward(pictures):
        return [detections((float("nan") if x.mean() < 0.1 else 5, 0.9)) for x in pictures]

    black = file_of(Image.new("RGB", (60, 40)))
    good, bad = runner(forward).run([encoded(0), black])
    assert good.corners[0, 0] == 5
    assert bad == "bad_value: the model gave NaN for this image"


def test_a_picture_that_the_network_cannot_take_is_the_reason_of_its_row_alone(tmp_path):
    net = small("FasterRCNN")
    save_detector(net, tmp_path / "net.pt2")
    thin = encoded(0, width=4000, height=1)  # torchvision's resize leaves it no height
    stage = ObjectDetector(model=str(tmp_path / "net.pt2"))
    errors = stage.predict([encoded(1), thin, thin, encoded(2)]).detectionsError.tolist()
    assert errors[0] is errors[3] is None
    assert errors[1] == errors[2]
    assert errors[1].startswith("bad_value: the model fails on this image of 4000x1: RuntimeError")


def test_a_network_that_fails_on_every_picture_fails_the_task():
    def forward(pictures):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        runner(forward).run([encoded(0), encoded(1)])


def test_a_network_that_gives_no_boxes_fails_the_task():
    with pytest.raises(ModelError, match="the model gives a Tensor for a list of 1"):
        runner(lambda pictures: torch.zeros(1, 4)).run([encoded(0)])


# --- files and sources ------------------------------------------------------------------------------------------------


def test_a_network_of_ones_own_is_a_stage():
    net = Corner()
    stage = ObjectDetector.from_module(net, labels=["nothing", "corner"], scoreThreshold=0.0, outputCol="found")
    row = stage.predict([picture(0, 60, 40)]).iloc[0]
    score = float(to_tensor(picture(0, 60, 40)).mean())
    assert row.found == [{"x1": 0, "y1": 0, "x2": 30, "y2": 20, "label": "corner", "score": pytest.approx(score)}]
    assert net.training
    assert ObjectDetector(model=stage.getModel(), labels=["a", "b"]).predict([]).columns.tolist() == [
        "detections", "detectionsError"
    ]  # fmt: skip


class Random(Corner):
    def __init__(self):
        super().__init__(noise=1.0)


class Python(Corner):
    def forward(self, images):
        return [dict(found) for found in super().forward(images)]


@pytest.mark.parametrize(
    ("net", "labels", "message"),
    [
        (Random(), (), "does not give the boxes that forward.. gives; is it random"),
        (Corner(label=5), ["a", "b"], r"gives the label 5, and there are 2 names.*\['background'"),
        (Python(), (), "torch.jit.script refuses it .*List.Dict"),
        (Pooled(), (), "Pooled"),
        (Corner, (), "type is not a torch.nn.Module"),
        (Corner(), "ab", "labels='ab' is a str"),
    ],
)
def test_what_is_no_detector_is_refused(net, labels, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        save_detector(net, tmp_path / "net.pt2", labels)
    assert not list(tmp_path.iterdir())


def test_a_zoo_name_is_built_once_and_takes_weights_and_labels(tmp_path, monkeypatch):
    model = f"torchvision:{SSD}"
    sha256 = resolve(model, "none", LABELS)
    card = read_card(store.path_of(sha256))
    assert card == DetectionCard(tuple(LABELS))
    monkeypatch.setattr("gpuml.models.detection_sources.save_detector", None)
    assert resolve(model, "none", LABELS) == sha256
    assert resolve(f"sha256:{sha256}") == sha256
    other = resolve(f"sha256:{sha256}", labels=["w", "x", "y", "z"])
    assert read_card(store.path_of(other)).labels == ("w", "x", "y", "z")
    assert resolve(f"sha256:{sha256}", labels=["w", "x", "y", "z"]) == other
    with pytest.raises(ModelError, match="3 labels in place of the 4"):
        resolve(f"sha256:{sha256}", labels=["x", "y", "z"])


def test_a_state_dict_goes_into_the_zoos_network(made, tmp_path, files):
    net = network(SSD)
    torch.save(net.state_dict(), tmp_path / "w.pth")
    stage = ObjectDetector(
        model=f"torchvision:{SSD}", weights=str(tmp_path / "w.pth"), labels=LABELS, scoreThreshold=THRESHOLD
    )
    best = [row[0] for row in stage.predict(files[:2]).detections]
    expected = made(SSD)[1]
    for box, found in zip(best, expected, strict=False):
        np.testing.assert_allclose([box["x1"], box["y1"], box["x2"], box["y2"]], found["boxes"][0], atol=0.5)
    with pytest.raises(ModelError, match=f"do not fit torchvision:{SSD} with 2 outputs"):
        resolve(f"torchvision:{SSD}", str(tmp_path / "w.pth"), ["a", "b"])


def test_the_zoos_labels_are_the_categories_of_its_weights():
    built = []
    for name in torchvision.models.list_models(module=zoo):
        for entry in torchvision.models.get_model_weights(name):
            built.append(len(entry.meta["categories"]))
    assert set(built) == {2, 91}
    with pytest.raises(ModelError, match=r"3 labels for the weights .*COCO_V1 with 91 categories"):
        resolve("torchvision:fasterrcnn_resnet50_fpn", labels=["a", "b", "c"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("torchvision:resnet50", r"ImageClassifier\(model='torchvision:resnet50'\)"),
        ("torchvision:fasterrcnn_resnet50", "Did you mean 'torchvision:fasterrcnn_resnet50_fpn'"),
        ("fasterrcnn_resnet50_fpn", "Did you mean 'torchvision:fasterrcnn_resnet50_fpn'"),
        ("net", r"Did you mean './net\.pt2'"),
        ("timm:resnet18", "save_detector"),
        ("hf:facebook/detr-resnet-50", "save_detector"),
        ("python:package.module:function", "save_detector"),
        ("nowhere:net", "no such source"),
    ],
)
def test_other_sources_are_refused_with_advice(source, message):
    with pytest.raises(ModelError, match=message):
        ObjectDetector(model=source).predict([None])


def test_weights_beside_a_file_are_refused_without_the_secrets_of_their_url():
    told = r"weights='https://host/w\.pth' go with a zoo's name such as 'torchvision:fasterrcnn_resnet50_fpn', not"
    with pytest.raises(ModelError, match=told):
        resolve("./net.pt2", "https://me:secret@host/w.pth?signature=secret")


def test_a_file_of_another_kind_names_the_stage_that_runs_it(tmp_path):
    save_detector(Corner(), tmp_path / "boxes.pt2")
    save_model(Pooled(), tmp_path / "classes.pt2", preprocess=PLAIN)
    for stage in (ImageClassifier, ImageFeaturizer):
        with pytest.raises(ModelError, match=r"boxes\.pt2 is a network .* ObjectDetector runs it, not ImageClassifier"):
            stage(model=str(tmp_path / "boxes.pt2")).predict([None])
    with pytest.raises(ModelError, match=r"classes\.pt2 is a network .* ImageClassifier or .* not ObjectDetector"):
        ObjectDetector(model=str(tmp_path / "classes.pt2")).predict([None])
    with pytest.raises(ModelError, match=r"finds objects: ObjectDetector\(model='torchvision:fcos_resnet50_fpn'\)"):
        sources.resolve("torchvision:fcos_resnet50_fpn")


def test_a_file_without_a_card_is_refused(tmp_path):
    jit("save", jit("script", Corner()), tmp_path / "net.pt")
    with pytest.raises(ModelError, match="save_detector"):
        resolve(str(tmp_path / "net.pt"))


def test_the_command_line_shows_a_detector(tmp_path, capsys):
    save_detector(Corner(), tmp_path / "net.pt2", ["nothing", "corner"])
    assert main(["models", "show", str(tmp_path / "net.pt2")]) == 0
    shown = capsys.readouterr().out
    assert "outputs        boxes\n" in shown
    assert "2: nothing, corner\n" in shown


@pytest.mark.parametrize("value", [-0.1, 1.1, "x", True, float("nan")])
def test_a_threshold_is_between_0_and_1(value):
    with pytest.raises(ParamError, match="scoreThreshold"):
        ObjectDetector(scoreThreshold=value)


def test_half_precision_is_refused():
    with pytest.raises(ParamError, match=r"dtype='bfloat16'.*float32"):
        ObjectDetector(model="torchvision:ssd300_vgg16", dtype="bfloat16").predict([None])


def test_without_a_model_it_names_one_that_fits():
    with pytest.raises(ParamError, match="fasterrcnn"):
        ObjectDetector().predict([None])


# --- Spark ------------------------------------------------------------------------------------------------------------


def test_in_spark_boxes_are_the_eager_networks_also_saved_and_from_sql(spark, made, files, tmp_path):
    path, expected = made(FASTER)
    rows = [*enumerate(files), (10, None), (11, b"broken"), (12, file_of(Image.new("RGB", (64, 48))))]
    frame = spark.createDataFrame(rows, "id int, content binary").coalesce(1)
    stage = ObjectDetector(model=str(path), scoreThreshold=THRESHOLD, timingCol="timing", deviceCol="device")
    stage.save(str(tmp_path / "stage"))
    loaded = ObjectDetector.load(str(tmp_path / "stage"))
    assert loaded.extractParamMap() == stage.extractParamMap()
    out = loaded.transform(frame)
    boxes = "array<struct<x1:float,y1:float,x2:float,y2:float,label:string,score:float>>"
    assert out.schema["detections"].dataType.simpleString() == boxes
    given = out.collect()
    assert_equal([row.detections for row in given[:10]], expected)
    assert [row.detectionsError and row.detectionsError.split(":")[0] for row in given] == [
        *[None] * 10, "null_input", "not_image", None
    ]  # fmt: skip
    assert given[10].detections is given[11].detections is given[10].timing is None
    assert {row.device for row in given} == {"cpu"}
    assert given[0].timing.resize is None
    assert given[0].timing.decode > 0
    assert given[0].timing.compute > 1

    strict = loaded.copy().setScoreThreshold(1.0).setTimingCol("").setDeviceCol("").setHandleInvalid("skip")
    assert [row.detections for row in strict.transform(frame.where("id > 8")).collect()] == [[], []]

    gpuml.register_udf(spark, "find_objects", loaded)
    frame.where("id IN (0, 3, 10)").createOrReplaceTempView("pictures")
    found = spark.sql("SELECT id, r.* FROM (SELECT id, find_objects(content) AS r FROM pictures)")
    assert found.schema["detections"].dataType.simpleString() == boxes
    answers = found.orderBy("id").collect()
    assert_equal([row.detections for row in answers[:2]], [expected[0], expected[3]])
    assert answers[2].detections is None
