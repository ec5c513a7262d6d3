use proptest::prelude::*;

use super::*;

fn set(labels: &[&str]) -> LabelSet {
    labels.iter().map(|label| CanonicalLabel::parse(label).unwrap()).collect()
}

fn selector(terms: &[&str]) -> CompiledSelector {
    let mut selector = Selector::default();
    for term in terms.iter().map(|term| parse_term(term).unwrap()) {
        if term.exclude { selector.exclude.push(term.matcher) } else { selector.labels.push(term.matcher) }
    }
    CompiledSelector::compile(&selector).unwrap()
}

fn agent(labels: &[&str], mandatory: &[&str]) -> AgentFacts {
    AgentFacts { labels: set(labels), mandatory: set(mandatory), machine_id: None }
}

#[test]
fn labels_are_folded_once_and_checked() {
    assert_eq!(CanonicalLabel::parse(" GPU-A100 ").unwrap().as_str(), "gpu-a100");
    for bad in ["", " ", "a b", "a,b", "ä", "a\nb", &"x".repeat(129)] {
        assert!(CanonicalLabel::parse(bad).is_err(), "{bad:?}");
    }
    let error = CanonicalLabel::parse_user("KICI:os:linux").unwrap_err().to_string();
    assert_eq!(error, "label `kici:os:linux` starts with `kici:`, which only the system sets; choose another prefix");
}

#[test]
fn platforms_have_all_their_names() {
    for (os, arch, want) in [
        ("linux", "x86_64", set(&["kici:os:linux", "kici:arch:x64", "kici:arch:amd64"])),
        ("macos", "aarch64", set(&["kici:os:macos", "kici:os:darwin", "kici:arch:arm64"])),
        ("windows", "x86_64", set(&["kici:os:windows", "kici:os:win32", "kici:arch:x64", "kici:arch:amd64"])),
        ("freebsd", "riscv64", set(&["kici:os:freebsd", "kici:arch:riscv64"])),
    ] {
        assert_eq!(platform_labels(os, arch), want);
        assert!(want.iter().all(|label| is_self_reported(label) && is_automatic(label)));
    }
    assert_eq!(host_label("Build-1.example").unwrap().as_str(), "kici:host:build-1.example");
    assert_eq!((host_label(" "), host_label("a b")), (None, None));
    assert_eq!(agent_type_label(AgentType::BareMetal).as_str(), "kici:agent:bare-metal");
}

#[test]
fn terms_are_labels_globs_or_expressions() {
    for (text, exclude, want) in [
        ("Linux", false, Matcher::Exact { value: "linux".into() }),
        ("!spot", true, Matcher::Exact { value: "spot".into() }),
        ("/gpu-[0-9]+/", false, Matcher::Regex { source: "gpu-[0-9]+".into() }),
        ("${{ matrix.os }}", false, Matcher::Exact { value: "${{ matrix.os }}".into() }),
    ] {
        assert_eq!(parse_term(text), Ok(SelectorTerm { exclude, matcher: want }));
    }
    for bad in ["a b", "!", "", "/(/", r"/(a)\1/", "gpu-[", "ä*"] {
        assert!(parse_term(bad).is_err(), "{bad}");
    }
}

#[test]
fn the_match_rule_names_the_first_predicate_that_fails() {
    let linux = agent(&["linux", "gpu-a100", "spot"], &[]);
    for (terms, want) in [
        (vec!["linux", "GPU-*"], Ok(())),
        (vec!["linux", "/gpu-.*/", "!mac"], Ok(())),
        (vec!["linux", "arm"], Err("it has no label `arm`")),
        (vec!["/gpu/"], Err("it has no label /gpu/")),
        (vec!["linux", "!spot"], Err("its label `spot` is excluded by `spot`")),
        (vec!["linux", "!/sp.t/"], Err("its label `spot` is excluded by /sp.t/")),
    ] {
        let found = eligible(&selector(&terms), None, &linux).map_err(|mismatch| mismatch.to_string());
        assert_eq!(found, want.map_err(str::to_owned), "{terms:?}");
    }
    let tainted = agent(&["linux", "gpu"], &["gpu"]);
    assert_eq!(eligible(&selector(&["linux", "gpu"]), None, &tainted), Ok(()));
    assert_eq!(eligible(&selector(&["linux", "gp*"]), None, &tainted), Err(Mismatch::Taint("gpu".into())));
    let here = AgentFacts { machine_id: Some("m1".into()), ..agent(&["linux"], &[]) };
    assert_eq!(eligible(&selector(&["linux"]), Some("m1"), &here), Ok(()));
    assert_eq!(eligible(&selector(&["linux"]), Some("m2"), &here), Err(Mismatch::OtherMachine));
    assert_eq!(eligible(&selector(&["linux"]), Some("m1"), &linux), Err(Mismatch::OtherMachine));
}

#[test]
fn selectors_that_say_nothing_or_too_much_are_refused() {
    let exact = |value: &str| Matcher::Exact { value: value.to_owned() };
    let compile = |labels: Vec<Matcher>, exclude: Vec<Matcher>| {
        CompiledSelector::compile(&Selector { labels, exclude, ..Selector::default() })
            .map(|_| ())
            .map_err(|error| error.to_string())
    };
    assert!(compile(vec![], vec![exact("a")]).unwrap_err().contains("name at least one"));
    assert!(compile(vec![exact("a"); 31], vec![]).unwrap_err().contains("at most 30"));
    assert!(compile(vec![exact("${{ x }}")], vec![]).unwrap_err().contains("is not a label"));
    let broken = Matcher::Regex { source: "a)|(b".into() };
    assert!(compile(vec![broken], vec![]).is_err(), "an expression stands for itself, not for its surroundings");
    assert!(serde_json::from_str::<Matcher>(r#""linux""#).is_err(), "a matcher without a kind is no matcher");
}

#[test]
fn an_unroutable_job_is_explained() {
    let job = selector(&["linux", "gpu"]);
    assert_eq!(explain_unroutable(&job, None, &[]).unwrap(), "no agent is registered; the job asks for `linux`, `gpu`");
    let agents = [agent(&["linux", "kici:os:linux"], &[]), agent(&["linux", "arm"], &[])];
    assert_eq!(
        explain_unroutable(&job, None, &agents).unwrap(),
        "no agent offers label `gpu`; agents offer: arm, linux, kici:os:linux"
    );
    let split = [agent(&["linux"], &[]), agent(&["gpu"], &[]), agent(&["linux", "gpu", "big"], &["big"])];
    assert_eq!(
        explain_unroutable(&job, None, &split).unwrap(),
        "no agent fits `linux`, `gpu`: it has no label `gpu`; it has no label `linux`; \
         it only takes jobs that ask for `big` by name"
    );
    assert_eq!(explain_unroutable(&job, None, &[agent(&["linux", "gpu"], &[])]), None);
}

proptest! {
    #[test]
    fn split_then_union_is_the_identity(labels in proptest::collection::btree_set("(kici:)?[a-c]{1,3}", 0..8)) {
        let whole: LabelSet = labels.iter().map(|label| CanonicalLabel::parse(label).unwrap()).collect();
        let SplitLabels { user, automatic } = split(&whole);
        prop_assert!(user.iter().all(|label| CanonicalLabel::parse_user(label.as_str()).is_ok()));
        prop_assert!(automatic.iter().all(is_automatic));
        prop_assert_eq!(user.union(&automatic).cloned().collect::<LabelSet>(), whole);
    }

    /// Against the rule as it is written in dispatch 2.6.
    #[test]
    fn the_match_rule_agrees_with_its_definition(
        want in proptest::collection::vec("[a-d]", 1..4),
        not in proptest::collection::vec("[a-d]", 0..2),
        have in proptest::collection::btree_set("[a-d]", 0..5),
        taints in proptest::collection::btree_set("[a-d]", 0..2),
    ) {
        let terms: Vec<String> = want.iter().cloned().chain(not.iter().map(|label| format!("!{label}"))).collect();
        let selector = selector(&terms.iter().map(String::as_str).collect::<Vec<_>>());
        let strings = |labels: &BTreeSet<String>| labels.iter().map(|l| CanonicalLabel::parse(l).unwrap()).collect();
        let facts = AgentFacts { labels: strings(&have), mandatory: strings(&taints), machine_id: None };
        let expected = want.iter().all(|label| have.contains(label))
            && not.iter().all(|label| !have.contains(label))
            && taints.iter().all(|taint| want.contains(taint));
        prop_assert_eq!(eligible(&selector, None, &facts).is_ok(), expected);
        prop_assert_eq!(explain_unroutable(&selector, None, std::slice::from_ref(&facts)).is_none(), expected);
    }
}
