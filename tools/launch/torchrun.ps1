# Train on this Windows machine, on all of its devices:
#
#   tools\launch\torchrun.ps1 --gin_file run/gsm8k.gin [further flags of grpo_fn.run]
#
# One rank per GPU that nvidia-smi lists; without it $env:NPROC ranks, or one. Environment: PYTHON, NPROC, MAX_RESTARTS.
# This is torchrun itself, without agent.py, which needs POSIX signals: every failure is exit code 1, and a stop by
# Ctrl-C goes on from the newest checkpoint.
$ErrorActionPreference = 'Stop'

function Fail($Text) {
    [Console]::Error.WriteLine("error: $Text")
    exit 2
}

$Python = if ($env:PYTHON) { $env:PYTHON } else { 'python' }
if (-not (Get-Command $Python -ErrorAction SilentlyContinue)) {
    Fail "got no program $Python, wanted a Python with this project installed (set PYTHON)"
}
if (-not ($args -match '^--gin_file')) {
    Fail 'got no --gin_file, wanted one, as in --gin_file run/arithmetic.gin'
}

$Count = 1
if ($env:NPROC) {
    $Count = [int]$env:NPROC
} elseif (Get-Command nvidia-smi -ErrorAction SilentlyContinue) {
    $Count = [Math]::Max(1, @(nvidia-smi -L | Select-String '^GPU').Count)
}
$Restarts = if ($env:MAX_RESTARTS) { [int]$env:MAX_RESTARTS } else { 3 }

& $Python -m torch.distributed.run --standalone "--nproc-per-node=$Count" "--max-restarts=$Restarts" -m grpo_fn.run @args
exit $LASTEXITCODE
