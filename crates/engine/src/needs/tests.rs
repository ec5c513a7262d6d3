use proptest::prelude::*;

use super::*;

fn need(job: &str, run_on: &[JobStatus]) -> Need {
    Need::on(job, run_on)
}

fn node(base_name: &str, status: JobStatus, needs: Vec<Need>) -> Node {
    Node { base_name: base_name.to_owned(), status, needs_satisfied: false, needs }
}

fn failures() -> Vec<JobStatus> {
    JobStatus::terminal().filter(|status| status.is_failure()).collect()
}

fn always() -> Vec<JobStatus> {
    JobStatus::terminal().collect()
}

/// Acceptance 17 of workflows-and-events: a failing upstream with `always`, `on-failure` and the default, and the cascade of
/// skips, for a graph of six.
#[test]
fn acceptance_17_needs_and_skip_cascade() {
    use JobStatus::*;
    let nodes = [
        node("build", Failed, vec![]),
        node("report", Pending, vec![need("build", &always())]),
        node("rollback", Pending, vec![need("build", &failures())]),
        node("test", Pending, vec![need("build", &[Success])]),
        node("deploy", Pending, vec![need("test", &[Success])]),
        node("notify", Pending, vec![need("deploy", &[Success, Skipped])]),
    ];
    let found = propagate(&nodes);
    assert_eq!(found.ready, [1, 2, 5]);
    let want = [(3, "upstream_unmet: build (failed)".to_owned()), (4, "upstream_unmet: test (skipped)".to_owned())];
    assert_eq!(found.skipped, want);
}

#[test]
fn variants_are_judged_together() {
    use JobStatus::*;
    for (children, want) in [
        (vec![], None),
        (vec![Success, Running], None),
        (vec![Unroutable], Some(Unroutable)),
        (vec![Success, TimedOutStale, Cancelled], Some(Failed)),
        (vec![Success, Cancelled, Skipped], Some(Cancelled)),
        (vec![Skipped, Skipped], Some(Skipped)),
        (vec![Skipped, Success], Some(Success)),
    ] {
        assert_eq!(aggregate(children.clone()), want, "{children:?}");
    }
    let open = [node("t", Success, vec![]), node("t", Queued, vec![]), node("d", Pending, vec![need("t", &[Success])])];
    assert_eq!(propagate(&open), Propagation::default(), "one variant is still open");
}

#[test]
fn an_unmet_edge_decides_before_the_open_ones_and_by_name() {
    let status = |name: &str| match name {
        "b" => Some(JobStatus::Failed),
        "a" => Some(JobStatus::Cancelled),
        _ => None,
    };
    let edges = [need("open", &[JobStatus::Success]), need("b", &[JobStatus::Success]), need("a", &[])];
    let want = Verdict::Skip { reason: "upstream_unmet: a (cancelled)".to_owned() };
    assert_eq!(decide(&edges, status), want);
    assert_eq!(decide(&edges[..1], status), Verdict::Wait);
    assert_eq!(decide(&[], status), Verdict::Ready);
}

#[test]
fn cycles_are_named_as_a_path() {
    let graph = |edges: &[(&'static str, &[&'static str])]| -> BTreeMap<&'static str, Vec<&'static str>> {
        edges.iter().map(|(name, targets)| (*name, targets.to_vec())).collect()
    };
    let cyclic = graph(&[("build", &["test"]), ("test", &["lint", "build"]), ("lint", &[])]);
    assert_eq!(find_cycle(&cyclic), Some(vec!["build", "test", "build"]));
    assert_eq!(find_cycle(&graph(&[("a", &["a"])])), Some(vec!["a", "a"]));
    assert_eq!(find_cycle(&graph(&[("a", &["b", "c"]), ("b", &["d"]), ("c", &["d"]), ("d", &["gone"])])), None);
    let names: Vec<String> = (0..100_000).map(|n| n.to_string()).collect();
    let chain: BTreeMap<&str, Vec<&str>> = names.windows(2).map(|w| (w[0].as_str(), vec![w[1].as_str()])).collect();
    assert_eq!(find_cycle(&chain), None, "depth does not use the stack");
}

/// A graph of up to 200 jobs, edges pointing to earlier ones, some base names shared, with statuses.
fn any_graph() -> impl Strategy<Value = Vec<Node>> {
    let job = (
        proptest::collection::vec(
            (any::<proptest::sample::Index>(), proptest::sample::subsequence(always(), 1..4)),
            0..4,
        ),
        proptest::sample::select(JobStatus::ALL),
        proptest::bool::weighted(0.6),
        any::<bool>(),
        proptest::bool::weighted(0.1),
    );
    proptest::collection::vec(job, 1..200).prop_map(|jobs| {
        let mut nodes: Vec<Node> = Vec::new();
        let mut group = 0;
        for (at, (edges, status, pending, joins, satisfied)) in jobs.into_iter().enumerate() {
            // Variants stand next to each other and have the same needs, as in a plan.
            let previous = nodes.last().filter(|_| joins && at % 3 == 0).map(|node| node.needs.clone());
            let needs = previous.unwrap_or_else(|| {
                group = at;
                let mut needs: Vec<Need> = Vec::new();
                for (index, run_on) in edges {
                    let job = nodes.get(index.index(at.max(1))).map(|node: &Node| node.base_name.clone());
                    if let Some(job) = job.filter(|job| needs.iter().all(|need| need.job != *job)) {
                        needs.push(Need::on(job, run_on));
                    }
                }
                needs
            });
            let status = if pending { JobStatus::Pending } else { status };
            nodes.push(Node { base_name: format!("j{group}"), status, needs_satisfied: satisfied, needs });
        }
        nodes
    })
}

/// The rule of dispatch 3.11 applied over and over until nothing changes.
fn brute_force(nodes: &[Node]) -> (Vec<usize>, BTreeSet<usize>) {
    let mut status: Vec<JobStatus> = nodes.iter().map(|node| node.status).collect();
    loop {
        let group = |name: &str| -> Vec<JobStatus> {
            (0..nodes.len()).filter(|at| nodes[*at].base_name == name).map(|at| status[at]).collect()
        };
        let waits = |at: &usize| status[*at] == JobStatus::Pending && !nodes[*at].needs_satisfied;
        let ended = |name: &str| group(name).iter().all(|status| status.is_terminal());
        let met = |need: &Need| aggregate(group(&need.job)).is_some_and(|status| need.run_on.contains(&status));
        let skips: Vec<usize> = (0..nodes.len())
            .filter(waits)
            .filter(|at| nodes[*at].needs.iter().any(|need| ended(&need.job) && !met(need)))
            .collect();
        if skips.is_empty() {
            let ready = (0..nodes.len()).filter(waits).filter(|at| nodes[*at].needs.iter().all(met)).collect();
            let skipped = (0..nodes.len()).filter(|at| status[*at] != nodes[*at].status).collect();
            return (ready, skipped);
        }
        skips.into_iter().for_each(|at| status[at] = JobStatus::Skipped);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn acceptance_19_random_graphs_agree_with_brute_force(nodes in any_graph()) {
        let found = propagate(&nodes);
        let (ready, skipped) = brute_force(&nodes);
        prop_assert_eq!(&found.ready, &ready);
        prop_assert_eq!(found.skipped.iter().map(|(at, _)| *at).collect::<BTreeSet<_>>(), skipped);

        let mut applied = nodes;
        found.skipped.iter().for_each(|(at, _)| applied[*at].status = JobStatus::Skipped);
        found.ready.iter().for_each(|at| applied[*at].needs_satisfied = true);
        prop_assert_eq!(propagate(&applied), Propagation::default(), "a second pass finds nothing");
    }
}
