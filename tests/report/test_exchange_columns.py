"""A CSV with named columns and units reaches records and a roofline."""

import json

import pytest
from test_exchange import written

from rooflab.bench.exchange.convert import read

CSV = "what,time_us,work\nfast,10,2\nslow,40,2\n"
MAP = ("kernel=what", "latency=time_us:us", "flops=work:gflop", "bytes==1:MB", "op==mine", "scheme==bf16")


def test_a_csv_of_named_columns_and_units_reaches_a_roofline(rooflab, tmp_path):
    columns = [word for column in (*MAP, "gpu==h100") for word in ("--column", column)]
    written(tmp_path / "a.csv", CSV)
    assert rooflab("import", "csv", "a.csv", *columns, "--out", "kept")[0] == 0
    assert rooflab("import", "csv", "a.csv", *columns[:-2], "--out", "unnamed")[0] == 0
    status, out, err = rooflab("roofline", "kept", "--gpu", "h100", "--out", "x.svg", "--json")
    points = {point["label"]: (point["seconds"], point["flops"]) for point in json.loads(out)["points"]}
    assert points == {"fast": (pytest.approx(1e-5), 2e9), "slow": (pytest.approx(4e-5), 2e9)}, err
    status, _, err = rooflab("roofline", "kept")
    assert status == 2 and "--gpu names the GPU" in " ".join(err.split())
    _, _, err = rooflab("roofline", "unnamed", "--gpu", "h100", "--out", "y.svg")
    assert "its records name no GPU, which `import --column gpu==h100` names" in " ".join(err.split())


def test_the_cases_of_a_known_op_are_those_of_its_check_and_an_empty_cell_leaves_a_key_out(tmp_path):
    columns = ("op=op", "kernel==mine", "latency==1:us", "case.T=T", "case.H=H", "case.eps=eps", "scheme==bf16")
    rows = "op,T,H,eps\nrmsnorm,8,64,1e-5\nsoftmax,8,64,\nrmsnorm,8,64,\n"
    found = read("csv", [written(tmp_path / "a.csv", rows)], columns)
    assert [record.case_id for record in found.records] == ["T=8,H=64,eps=1e-05", "T=8,H=64"]
    (skipped,) = found.skipped
    assert skipped.place == "line 4"
    assert skipped.reason.startswith("case: rmsnorm takes the keys of T=8,H=64,eps=1e-05 and perhaps")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"latency": "time_us"}, "^column: expected latency=COLUMN:UNIT, in s, ms, us, ns, got 'latency=time_us'"),
        ({"kernel": "name"}, "^a.csv, line 2: expected a cell in column 'name', got None in what, time_us, work"),
        ({"latency": "what:us"}, "^a.csv, line 2: expected a number in column 'what', got 'fast' in "),
        ({"size": "work"}, "^column: expected FIELD=COLUMN with each once of op, kernel, "),
    ],
)
def test_a_csv_is_refused_by_the_name_of_what_is_missing(tmp_path, changed, message):
    columns = dict(column.split("=", 1) for column in MAP) | changed
    with pytest.raises(ValueError, match=message):
        read("csv", [written(tmp_path / "a.csv", CSV)], [f"{key}={value}" for key, value in columns.items()])
