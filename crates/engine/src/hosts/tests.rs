use serde_json::json;

use super::*;
use crate::labels::CanonicalLabel;
use crate::lock::Matcher;

fn host(id: &str, labels: &[&str]) -> Host {
    Host {
        agent_id: AgentId::new(id).unwrap(),
        labels: labels.iter().map(|text| CanonicalLabel::parse(text).unwrap()).collect(),
        lifecycle: Lifecycle::Static,
        status: HostStatus::Ready,
        scaler_managed: false,
        initialized: true,
        properties: BTreeMap::from([("rack".to_owned(), json!(3)), ("zone".to_owned(), json!("b"))]),
    }
}

fn fleet() -> Vec<Host> {
    let mut hosts = vec![
        host("web-2", &["role:web", "env:prod", "kici:host:web-2"]),
        host("web-1", &["role:web", "env:prod", "kici:host:web-1"]),
        host("web-c", &["role:web", "env:canary", "kici:host:web-canary"]),
        host("db-1", &["role:db", "env:prod", "pool/a"]),
    ];
    hosts[3].status = HostStatus::Unreachable;
    hosts.push(Host { scaler_managed: true, lifecycle: Lifecycle::Ephemeral, ..host("made-1", &["role:web"]) });
    hosts.push(Host { initialized: false, status: HostStatus::Unreachable, ..host("new-1", &["role:db"]) });
    hosts
}

/// Selectors in the text form, and the hosts that each means.
const CORPUS: &[(&str, &[&str])] = &[
    ("role:web", &["web-1", "web-2", "web-c"]),
    ("ROLE:WEB !kici:host:web-canary", &["web-1", "web-2"]),
    ("role:web,env:prod", &["web-1", "web-2"]),
    ("role:web,env:canary | role:db", &["db-1", "web-c"]),
    ("role:* !env:prod", &["web-c"]),
    ("/role:(web|db)/ !/env:c.*/", &["db-1", "web-1", "web-2"]),
    ("role:{web,db},env:prod", &["db-1", "web-1", "web-2"]),
    ("pool/a", &["db-1"]),
    ("/pool/./", &["db-1"]),
    ("none", &[]),
];

fn ids(hosts: &[&Host]) -> Vec<String> {
    hosts.iter().map(|host| host.agent_id.to_string()).collect()
}

#[test]
fn a_query_means_the_hosts_that_a_fan_out_goes_to() {
    let fleet = fleet();
    for (text, expected) in CORPUS {
        let query = HostQuery::parse(text).unwrap_or_else(|fault| panic!("{text}: {fault}"));
        let matcher = HostMatcher::compile(&query.selector).unwrap();
        assert_eq!(ids(&targets(&matcher, false, &fleet)), *expected, "{text}");
        let mut listed: Vec<&Host> = fleet.iter().filter(|host| query.matches(host)).collect();
        listed.retain(|host| !host.scaler_managed && host.initialized);
        listed.sort_by(|a, b| a.agent_id.cmp(&b.agent_id));
        assert_eq!(ids(&listed), *expected, "{text}");
    }
    let all = HostMatcher::compile(&HostQuery::parse("role:db").unwrap().selector).unwrap();
    assert_eq!(ids(&targets(&all, true, &fleet)), ["db-1", "new-1"]);
}

#[test]
fn conditions_narrow_lists() {
    let fleet = fleet();
    let found = |text: &str| {
        let query = HostQuery::parse(text).unwrap();
        assert!(query.has_conditions(), "{text}");
        ids(&fleet.iter().filter(|host| query.matches(host)).collect::<Vec<_>>())
    };
    assert_eq!(found("status=unreachable"), ["db-1", "new-1"]);
    assert_eq!(found("role:web,lifecycle=ephemeral"), ["made-1"]);
    assert_eq!(found("property:rack=3 property:zone=b env:canary"), ["web-c"]);
    assert!(found("property:rack=4").is_empty());
}

#[test]
fn a_bad_query_names_the_place() {
    for (text, position, part) in [
        ("role:web, b!d", 10, "not a label"),
        ("a | ", 4, "after `|`"),
        ("| a", 0, "before `|`"),
        ("ä status=gone", 0, "not a label"),
        ("a,status=gone", 2, "`ready` or `unreachable`"),
        ("a colour=red", 2, "no condition"),
        ("property:KICI:x=1", 0, "system's"),
        ("a /open", 2, "closing"),
        ("a /(/", 2, "("),
    ] {
        let fault = HostQuery::parse(text).unwrap_err();
        assert_eq!(fault.position, position, "{text}: {fault}");
        assert!(fault.problem.contains(part), "{text}: {fault}");
    }
    assert!(HostQuery::parse(&"a ".repeat(31)).unwrap_err().problem.contains("30"));
}

#[test]
fn a_host_is_ready_only_while_connected_and_heard_of() {
    let now = Ts::from_micros(1_000_000_000);
    let grace = Duration::from_secs(300);
    let seen = |seconds: u64| Some(now.minus(Duration::from_secs(seconds)));
    for (lifecycle, gone) in [(Lifecycle::Static, HostStatus::Unreachable), (Lifecycle::Ephemeral, HostStatus::Stale)] {
        for (connected, last_seen, expected) in
            [(true, seen(300), HostStatus::Ready), (true, seen(301), gone), (true, None, gone), (false, seen(0), gone)]
        {
            assert_eq!(host_status(lifecycle, connected, last_seen, now, grace), expected);
        }
    }
}

#[test]
fn what_becomes_of_a_job_on_an_absent_host() {
    use Lifecycle::{Ephemeral, Static};
    use OnUnreachable as P;
    let table = [
        (Some((Static, HostStatus::Ready)), [Reach::Run, Reach::Run, Reach::Run]),
        (Some((Static, HostStatus::Unreachable)), [Reach::Hold, Reach::Skip, Reach::Fail]),
        (Some((Ephemeral, HostStatus::Stale)), [Reach::Skip, Reach::Skip, Reach::Skip]),
        (None, [Reach::Hold, Reach::Skip, Reach::Fail]),
    ];
    for (host, expected) in table {
        assert_eq!([P::Hold, P::Skip, P::Fail].map(|policy| reach(host, policy)), expected, "{host:?}");
    }
}

#[test]
fn the_pinned_selector_is_the_group_that_holds() {
    let selector = HostQuery::parse("a,b | c !d").unwrap().selector;
    let labels = |texts: &[&str]| texts.iter().map(|t| CanonicalLabel::parse(t).unwrap()).collect::<LabelSet>();
    let exact = |value: &str| Matcher::Exact { value: value.into() };
    assert_eq!(pinned_selector(&selector, &labels(&["c"])).labels, [exact("c")]);
    let drifted = pinned_selector(&selector, &labels(&["x"]));
    assert_eq!((drifted.labels, drifted.exclude), (vec![exact("a"), exact("b")], vec![exact("d")]));
}

#[test]
fn reserved_properties_are_told_in_any_case() {
    for (key, reserved) in [("kici:a", true), ("KiCi:a", true), ("kici", false), ("äkici:", false), ("k", false)] {
        assert_eq!(is_reserved_property(key), reserved, "{key}");
    }
}
