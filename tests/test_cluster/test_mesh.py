"""Meshes of ranks: the arithmetic, and the groups along the axes on real ranks."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from colossalai.cluster import ProcessGroupManager, ProcessGroupMesh
from colossalai.cluster.device_mesh_manager import DeviceMeshInfo, DeviceMeshManager
from colossalai.device.device_mesh import DeviceMesh
from colossalai.utils.errors import ConfigError

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@pytest.mark.fast
@given(shapes, st.data())
def test_ravel_and_unravel_are_inverse_and_the_last_axis_is_fastest(shape, data):
    size = int(np.prod(shape))
    rank = data.draw(st.integers(0, size - 1))
    place = ProcessGroupMesh.unravel(rank, shape)
    assert ProcessGroupMesh.ravel(place, shape) == rank
    assert np.arange(size).reshape(shape)[place] == rank
    assert all(type(at) is int for at in place)


@pytest.mark.fast
def test_ravel_modes():
    assert ProcessGroupMesh.ravel((3, -1), (2, 3), mode="wrap") == 5
    assert ProcessGroupMesh.ravel((3, -1), (2, 3), mode="clip") == 3
    for place in ((2, 0), (0, 3), (-1, 0)):
        with pytest.raises(ValueError):
            ProcessGroupMesh.ravel(place, (2, 3))
    with pytest.raises(ConfigError, match="mode='bounce'"):
        ProcessGroupMesh.ravel((0, 0), (2, 3), mode="bounce")
    with pytest.raises(ValueError):
        ProcessGroupMesh.unravel(6, (2, 3))


@pytest.mark.fast
def test_coords_along_axes():
    along = ProcessGroupMesh.get_coords_along_axis
    assert along((1, 0, 2), 1, [0, 1]) == [(1, 0, 2), (1, 1, 2)]
    assert along((0, 1, 0), [0, 2], [[0, 1], [3, 4]]) == [(0, 1, 3), (0, 1, 4), (1, 1, 3), (1, 1, 4)]


@pytest.mark.fast
def test_mesh_needs_a_world():
    with pytest.raises(ConfigError, match="launch_from_torch"):
        ProcessGroupMesh(2, 2)
    with pytest.raises(ConfigError, match="at least 1"):
        ProcessGroupMesh(2, 0)


def groups_of_a_mesh(rank, world_size):
    mesh = ProcessGroupMesh(2, 2)
    rows, columns = mesh.get_group_along_axis(1), mesh.get_group_along_axis(0)
    everybody = mesh.get_group_along_axis([0, 1])
    first_row_only = mesh.create_group_along_axis(0, [0])
    sums = []
    for group in (rows, columns, everybody):
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=group)
        sums.append(total.item())
    return {
        "shape": (mesh.shape, mesh.size(), mesh.size(0)),
        "place": (mesh.rank, mesh.coordinate(), mesh.coordinate(1)),
        "ranks": [mesh.get_ranks_in_group(group) for group in (rows, columns, everybody)],
        "sums": sums,
        "cached": mesh.get_group_along_axis(1) is rows and mesh.get_group_along_axis(-1) is rows,
        "single": None if first_row_only is None else mesh.get_ranks_in_group(first_row_only),
        "limits": {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in (rows, everybody)},
        "left": mesh.destroy_mesh_process_groups(),
    }


def test_groups_along_axes(workers):
    seen = workers(4).run(groups_of_a_mesh)
    for rank, one in enumerate(seen):
        row, column = divmod(rank, 2)
        assert one["shape"] == ((2, 2), (2, 2), 2)
        assert one["place"] == (rank, (row, column), column)
        assert one["ranks"] == [[2 * row, 2 * row + 1], [column, column + 2], [0, 1, 2, 3]]
        assert one["sums"] == [float(4 * row + 1), float(2 * column + 2), 6.0]
        assert one["cached"]
        assert one["single"] == ([column] if row == 0 else None)
        assert one["limits"] == {600.0}  # torch does not hand on the limit of the world; the mesh must


def refusals(rank, world_size):
    mesh = ProcessGroupMesh(world_size, 1)
    said = []
    for wrong in (
        lambda: ProcessGroupMesh(3, 1),
        lambda: mesh.get_group_along_axis(2),
        lambda: mesh.get_group_along_axis([0, 0]),
        lambda: mesh.get_group_along_axis([]),
        lambda: mesh.get_group_along_axis(0, [world_size]),
        lambda: mesh.get_group_along_axis([0, 1], [[0]]),
        lambda: mesh.get_group_along_axis(0, backend="smoke"),
        lambda: mesh.get_ranks_in_group(dist.group.WORLD),
    ):
        try:
            wrong()
            said.append("nothing")
        except ConfigError as error:
            said.append(str(error))
    return said


def test_refusals(workers):
    said = workers(2).run(refusals)[0]
    starts = [
        "ProcessGroupMesh(3, 1): the axes hold 3 ranks, and the world has 2",
        "axis=2: this mesh has the axes 0 to 1",
        "axis=[0, 0]: an axis stands there twice",
        "axis=[]:",
        "indices_at_axis=[2]: axis 0 has the indices 0 to 1",
        "indices_at_axis=[[0]]: give one list",
        "backend='smoke'",
        "get_ranks_in_group",
    ]
    assert [text.startswith(start) for text, start in zip(said, starts, strict=True)] == [True] * 8, said


def named_groups(rank, world_size):
    manager = ProcessGroupManager()
    pair = manager.create_process_group("pair", [0, 1])
    total = torch.ones(1)
    dist.all_reduce(total, group=pair)
    errors = []
    for wrong in (
        lambda: manager.create_process_group("pair", [0]),
        lambda: manager.get("x"),
        lambda: manager.destroy("x"),
    ):
        try:
            wrong()
        except ValueError as error:
            errors.append(str(error))
    same = manager.get("pair") is pair
    manager.create_process_group("mine", [rank]) if world_size == 1 else None
    manager.destroy("pair")
    manager.destroy_all()
    return total.item(), same, errors, manager._groups


def test_process_group_manager(workers):
    for total, same, errors, left in workers(2).run(named_groups):
        assert (total, same, left) == (2.0, True, {})
        assert ["name='pair'" in errors[0], "name='x'" in errors[1], "name='x'" in errors[2]] == [True] * 3


# Device meshes.


@pytest.mark.fast
def test_device_mesh_without_groups():
    mesh = DeviceMesh(torch.arange(8), (2, 4))
    assert mesh.shape == (2, 4) and mesh.num_devices == 8
    assert torch.equal(mesh.physical_mesh_id, torch.arange(8).reshape(2, 4))
    assert mesh.get_ranks_in_process_group(0, 5) == [1, 5] and mesh.get_ranks_in_process_group(-1, 5) == [4, 5, 6, 7]
    assert mesh.global_rank_to_local_rank(6) == [1, 2] and mesh.global_rank_to_local_rank(6, 1) == 2
    assert mesh.flatten().shape == (8,)
    turned = DeviceMesh(torch.arange(4), logical_mesh_id=torch.tensor([[0, 2], [1, 3]]))
    assert turned.get_ranks_in_process_group(1, 0) == [0, 2] and turned.flatten().physical_mesh_id.tolist() == [
        0,
        2,
        1,
        3,
    ]
    assert not mesh.is_initialized and "shape=(2, 4)" in repr(mesh)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (lambda: DeviceMesh(torch.arange(4)), "one of mesh_shape and logical_mesh_id"),
        (lambda: DeviceMesh(torch.arange(4), (3,)), r"mesh_shape=\(3,\) holds 3"),
        (lambda: DeviceMesh(torch.tensor([0, 0]), (2,)), "physical_mesh_id"),
        (lambda: DeviceMesh(torch.arange(2), logical_mesh_id=torch.tensor([[0, 3]])), "logical_mesh_id"),
        (lambda: DeviceMesh(torch.arange(2), (1, 2), mesh_alpha=[1.0]), "mesh_alpha"),
        (lambda: DeviceMesh(torch.arange(2), (2,)).get_ranks_in_process_group(1, 0), "axis=1"),
        (lambda: DeviceMesh(torch.arange(2), (2,)).get_process_group(0, 5), "global_rank=5"),
        (lambda: DeviceMesh(torch.arange(2), (2,)).get_process_group(0, 1), "init_process_group=True"),
        (lambda: DeviceMesh.from_process_group([]), "empty list"),
    ],
)
def test_device_mesh_refuses(wrong, name):
    with pytest.raises(ConfigError, match=name):
        wrong()


def device_meshes(rank, world_size):
    mesh = DeviceMesh(torch.arange(4), (2, 2), init_process_group=True)
    sums = []
    for group in mesh.get_process_group_for_all_axes().values():
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=group)
        sums.append(total.item())
    groups = [mesh.get_process_group(0), mesh.get_process_group(1)]
    again = DeviceMesh.from_process_group(groups)
    single = DeviceMesh.from_process_group(groups[1])
    manager = DeviceMeshManager()
    made = manager.create_device_mesh("all", DeviceMeshInfo([0, 1, 2, 3], [4]))
    kept = manager.get("all") is made and made.is_initialized
    manager.destroy_all()
    result = (
        sums,
        again.physical_mesh_id.tolist(),
        again.get_process_group(0) is groups[0],
        single.physical_mesh_id.tolist(),
        mesh.global_rank_to_local_rank(rank),
        kept,
    )
    mesh.destroy_process_groups()
    return result


def test_device_mesh_with_groups(workers):
    for rank, one in enumerate(workers(4).run(device_meshes)):
        row, column = divmod(rank, 2)
        assert one == (
            [float(2 * column + 2), float(4 * row + 1)],
            [[0, 1], [2, 3]],
            True,
            [2 * row, 2 * row + 1],
            [row, column],
            True,
        )


@pytest.mark.fast
def test_every_rank_is_on_the_line_of_its_neighbours():
    mesh = DeviceMesh(torch.tensor([7, 3, 5, 1, 0, 2]), (3, 2))
    for axis, rank in itertools.product(range(2), range(8)):
        if rank in (4, 6):
            with pytest.raises(ConfigError):
                mesh.get_ranks_in_process_group(axis, rank)
        else:
            line = mesh.get_ranks_in_process_group(axis, rank)
            assert rank in line and all(mesh.get_ranks_in_process_group(axis, other) == line for other in line)
