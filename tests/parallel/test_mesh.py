import jax
import pytest

from peagle_jax.parallel.mesh import AXES, MeshError, MeshShape, decoding_mesh, mesh_shape, training_mesh


def test_data_takes_the_devices_that_the_others_leave():
    assert mesh_shape(0, 1, 1, 8) == MeshShape(8, 1, 1)
    assert mesh_shape(0, 2, 2, 8) == MeshShape(2, 2, 2)
    assert mesh_shape(0, 1, 1, 1) == MeshShape()


def test_a_mesh_may_leave_devices_idle_but_must_divide_them():
    assert mesh_shape(2, 2, 1, 8).size == 4
    for sizes, wanted in (((0, 3, 1), 3), ((2, 2, 3), 12), ((0, 16, 1), 16)):
        with pytest.raises(MeshError, match=f"needs a multiple of {wanted} devices, found 8; choose"):
            mesh_shape(*sizes, 8)


@pytest.mark.parametrize("shape", [MeshShape(2, 2, 1), MeshShape(1, 2, 1)])
def test_a_mesh_has_every_axis_and_its_devices_once(shape):
    mesh = training_mesh(shape, jax.devices())
    assert mesh.axis_names == AXES and tuple(mesh.shape.values()) == (shape.data, shape.fsdp, shape.sequence)
    assert len(set(mesh.devices.flat)) == shape.size


def test_a_replica_of_a_decoding_mesh_is_of_neighbours():
    mesh = decoding_mesh(jax.devices(), 2)
    assert dict(mesh.shape) == {"data": 2, "tensor": 2}
    assert mesh.devices.tolist() == [jax.devices()[:2], jax.devices()[2:]]
    assert decoding_mesh(jax.devices()[:3]).shape["data"] == 3
    with pytest.raises(MeshError, match="size of 3 needs a multiple of 3 devices, found 4; choose a divisor"):
        decoding_mesh(jax.devices(), 3)
