"""The rank of a process, its rows, and forbidden settings with several processes."""

import pytest
import torch
from refusals import refusing

import polyhead as ph
from polyhead.models.build import build
from polyhead.train.parallel import units
from polyhead.train.world import World, address_of_first, first_host, ranks_from


def world(rank, size):
    return World(rank, size, rank, torch.device("cpu"))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 12])
def test_every_row_belongs_to_one_process(size, count):
    cuts = [world(rank, size).rows(count) for rank in range(size)]
    assert [row for cut in cuts for row in range(count)[cut]] == list(range(count))
    lengths = {cut.stop - cut.start for cut in cuts}
    assert max(lengths) - min(lengths) <= 1


def test_torchrun_before_slurm_before_nothing():
    slurm = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
    assert ranks_from({}) == (0, 1, 0)
    assert ranks_from(slurm) == (3, 4, 1)
    assert ranks_from(slurm | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}) == (1, 2, 1)
    assert ranks_from(slurm | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == (0, 1, 0)
    assert ranks_from({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}) == (0, 1, 0)  # a batch script


def test_the_first_of_slurms_hosts():
    assert first_host("node7") == "node7"
    assert first_host("node[001-003,007]-ib,login1") == "node001-ib"
    assert first_host("r[1-2]n[03-04]") == "r1n03"
    assert first_host("b-1.cluster.org,b-2.cluster.org") == "b-1.cluster.org"


def test_where_srun_gives_no_meeting_place():
    slurm = {"SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "2"}
    slurm |= {"SLURM_STEP_NODELIST": "n[3-4]", "SLURM_JOB_NODELIST": "n1"}
    host, port = address_of_first(slurm)
    assert host == "n3"
    assert 10000 <= port < 30000
    assert port != address_of_first(slurm | {"SLURM_STEP_ID": "3"})[1]  # two steps of a job at once
    assert address_of_first(slurm | {"MASTER_PORT": "7"}) == ("n3", 7)
    with refusing("world: several processes need MASTER_ADDR and MASTER_PORT; start them with"):
        address_of_first({})


def model(**settings):
    ends = (ph.Tokens(9), ph.Logits(9, tied=True))
    return build(ph.TransformerConfig(*ends, dim=8, layers=2, max_length=8, **settings))


def test_blocks_are_units():
    plain = model(heads=ph.Softmax(2))
    assert units(plain) == list(plain.blocks)
    encoder_config = ph.TransformerConfig(ph.Tokens(9), ph.Logits(9), dim=8, layers=1, max_length=8)
    both = model(encoder=encoder_config, causal=True)
    assert set(units(both)) == {*both.blocks, *both.encoder.blocks}


def test_shared_parameters_and_early_symbols_are_no_units():
    with_symbols = model(heads=ph.Relational(2, symbols=ph.SymbolicAttention(count=4, heads=1, shared=False)))
    chosen = units(with_symbols)
    assert with_symbols.blocks[0] not in chosen
    assert with_symbols.blocks[0].attention in chosen
    with_shared_layer = model(heads=ph.Softmax(2))
    with_shared_layer.blocks[1].feedforward = with_shared_layer.blocks[0].feedforward
    assert units(with_shared_layer) == []
