"""Bytes of an HLO text: loops as often as they run, slices as what is sliced, on-chip memory as nothing."""

import pytest
from hlo_bytes import Program, bytes_of

TEXT = """\
HloModule jit_f

%sliced (p0: f32[8,4,16], p1: s32[]) -> f32[4,16] {
  %p0 = f32[8,4,16]{2,1,0:T(8,128)} parameter(0)
  %p1 = s32[]{:T(128)S(6)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %cut = f32[1,4,16]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,4,16}
  ROOT %flat = f32[4,16]{1,0:S(1)} bitcast(%cut)
}

%body (t: (s32[], f32[8,4,16])) -> (s32[], f32[8,4,16]) {
  %t = (s32[]{:T(128)S(6)}, f32[8,4,16]{2,1,0}) parameter(0)
  %i = s32[]{:T(128)S(6)} get-tuple-element(%t), index=0
  %w = f32[8,4,16]{2,1,0} get-tuple-element(%t), index=1
  %x = f32[4,16]{1,0:S(1)} fusion(%w, %i), kind=kLoop, calls=%sliced, metadata={op_name="f/while/body/cut"}
  %sum = f32[4,16]{1,0:S(1)} all-reduce(%x), to_apply=%add, metadata={op_name="f/while/body/sum"}
  ROOT %out = (s32[]{:T(128)S(6)}, f32[8,4,16]{2,1,0}) tuple(%i, %w)
}

%turns (t: (s32[], f32[8,4,16])) -> pred[] {
  %t = (s32[]{:T(128)S(6)}, f32[8,4,16]{2,1,0}) parameter(0)
  %i = s32[]{:T(128)S(6)} get-tuple-element(%t), index=0
  %n = s32[]{:T(128)} BOUND
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

%cheap (a: bf16[10]) -> bf16[10] {
  ROOT %a = bf16[10]{0} parameter(0)
}

%dear (a: bf16[10]) -> bf16[10] {
  %a = bf16[10]{0} parameter(0)
  ROOT %b = bf16[10]{0} add(%a, %a)
}

ENTRY %main (w: f32[8,4,16], v: bf16[10], c: s32[]) -> bf16[10] {
  %w = f32[8,4,16]{2,1,0:T(8,128)} parameter(0)
  %v = bf16[10]{0} parameter(1)
  %c = s32[]{:T(128)S(6)} parameter(2)
  %start = (s32[]{:T(128)S(6)}, f32[8,4,16]{2,1,0}) tuple(%c, %w)
  %loop = (s32[]{:T(128)S(6)}, f32[8,4,16]{2,1,0}) while(%start), condition=%turns, body=%body, metadata={op_name="f/layers/while"}
  ROOT %done = bf16[10]{0} conditional(%c, %v, %v), branch_computations={%cheap, %dear}
}
"""  # noqa: E501


def program(bound: str) -> Program:
    return Program(TEXT.replace("BOUND", bound), lambda scope: {"f/layers/while": 2.5}[scope])


@pytest.mark.parametrize(
    ("bound", "turns"), [("constant(8)", 8), ("get-tuple-element(%t), index=0", 2.5)], ids=["counted", "data"]
)
def test_a_loop_counts_as_often_as_it_runs_and_a_slice_as_what_is_sliced(bound, turns):
    found = program(bound)
    assert found.bytes_moved == turns * 4 * 16 * 4
    assert found.loops() == [("f/layers/while", turns, 4 * 16 * 4)]


def test_collectives_are_told_by_where_they_are():
    assert program("constant(8)").collectives() == {"all-reduce in the layers": 1}


def test_types_of_any_width_in_main_memory():
    kind = "(bf16[3,5]{1,0:T(8,128)(2,1)}, u4[8]{0}, pred[7]{0}, f8e4m3fn[2,2]{1,0}, f32[100]{0:S(1)}, s32[])"
    assert bytes_of(kind) == 30 + 4 + 7 + 4 + 4
    assert bytes_of(kind, anywhere=True) == 30 + 4 + 7 + 4 + 4 + 400
