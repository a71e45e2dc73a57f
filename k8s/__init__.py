"""What the cluster runs, from the checked settings, and the commands that talk to it. Never imports torch.

To send a run, in the order in which to read:

    job_spec    the settings of a run in the cluster, which overlay it takes, and what its pods are told
    render      the manifests, filled in by kustomize
    image_ref   which image pods run
    kubectl     the user's own kubectl, and its complaints as sentences
    preflight   what can be told before anything is changed
    secret      the keys, from the settings to the Secret
    launch_plan what a run will cost
    standing    the Job that is there already, and in what it differs
    apply       what changes the cluster
    placement   where the pods are, and what keeps them back
    pod_patch   POD_PATCH, merged into the pods that train
    launch      make train-8xa100, finetune-k8s and data WHERE=cluster, of all these
    slurm       the same as a job of Slurm, with ENGINE=slurm
    slurm_batch what that job runs, and whether it starts again
    slurm_node  one node of that job
    nodes       make sites, and the nodes that others ask about

To look after one:

    where       here or in a cluster: whose job a command is about
    target      what the API says of a job
    unscheduled which setting lets a pod find a node
    words       the same, in plain words
    overview    make status
    logs        make logs and make attach
    log_lines   which lines ONLY shows
    log_errors  which lines are errors
    describe    make describe
    volume      commands in a pod that sees the volume
    checkpoints make checkpoints
    transfer    files from a pod to this machine
    fetch_run   make fetch-run
    jobs        the targets themselves, each by these

The modules that read the cluster are in cluster/. The folders of manifests/ are YAML with stand-ins where a
setting goes: base/ is what every Job has, overlays/ what the kinds of it change, site/ a part of those at one
zone, diloco/ of those whose pods are sites, finetune/ of those with a MODEL; lighthouse/ is what sites find
each other by, claim/ the volume and reader/ a pod that reads it; fields/ says which value lands where, and
network/ has NCCL's variables. docs/manifests.md tells more.
"""
