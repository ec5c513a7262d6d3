use proptest::prelude::*;

use super::*;

fn ts(text: &str) -> Ts {
    Ts::parse_rfc3339(text).unwrap()
}

fn next(pattern: &str, zone: &str, after: &str, count: usize) -> Vec<String> {
    let cron = Cron::parse(pattern, zone).unwrap();
    let mut at = ts(after);
    let mut found = Vec::new();
    for _ in 0..count {
        at = cron.next_after(at).unwrap();
        found.push(at.to_datetime().to_rfc3339_opts(chrono::SecondsFormat::Secs, true));
    }
    found
}

const DAY: Duration = Duration::from_secs(24 * 3600);

#[test]
fn times_are_those_of_the_zone() {
    assert_eq!(
        next("0 3 * * 1-5", "Europe/Berlin", "2026-11-27T00:00:00Z", 3),
        ["2026-11-27T02:00:00Z", "2026-11-30T02:00:00Z", "2026-12-01T02:00:00Z"]
    );
    assert_eq!(next("30 8 29 2 *", "UTC", "2026-01-01T00:00:00Z", 1), ["2028-02-29T08:30:00Z"]);
    assert_eq!(next("30 0 12 * * *", "Asia/Kolkata", "2026-01-01T00:00:00Z", 1), ["2026-01-01T06:30:30Z"]);
    assert_eq!(next("@daily", "UTC", "2026-01-01T00:00:00Z", 1), ["2026-01-02T00:00:00Z"]);
}

#[test]
fn a_time_in_the_gap_comes_right_after_it_and_one_that_repeats_comes_once() {
    // Berlin goes from 02:00 to 03:00 at 2026-03-29T01:00Z, and back at 2026-10-25T01:00Z.
    assert_eq!(
        next("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00:00Z", 2),
        ["2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"]
    );
    assert_eq!(
        next("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00Z", 2),
        ["2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"]
    );
    assert_eq!(
        next("0 * * * *", "Europe/Berlin", "2026-10-24T23:30:00Z", 4),
        ["2026-10-25T00:00:00Z", "2026-10-25T01:00:00Z", "2026-10-25T02:00:00Z", "2026-10-25T03:00:00Z"]
    );
}

#[test]
fn a_pattern_with_several_named_hours_meets_each_of_them_once_on_every_day() {
    let days = |pattern: &str| {
        let spring = next(pattern, "Europe/Berlin", "2026-03-28T23:00:00Z", 6);
        let autumn = next(pattern, "Europe/Berlin", "2026-10-24T22:00:00Z", 6);
        let on = |all: Vec<String>, end: &str| all.into_iter().filter(|at| at.as_str() < end).collect::<Vec<_>>();
        (on(spring, "2026-03-29T22:00:00Z"), on(autumn, "2026-10-25T23:00:00Z"))
    };
    let table: [(&str, &[&str], &[&str]); 4] = [
        ("0 2,14 * * *", &["03-29T01:00", "03-29T12:00"], &["10-25T00:00", "10-25T13:00"]),
        ("0,30 2 * * *", &["03-29T01:00"], &["10-25T00:00", "10-25T00:30"]),
        (
            "30 1-5 * * *",
            &["03-29T00:30", "03-29T01:00", "03-29T01:30", "03-29T02:30", "03-29T03:30"],
            &["10-24T23:30", "10-25T00:30", "10-25T02:30", "10-25T03:30", "10-25T04:30"],
        ),
        ("15 30 2 * * *", &["03-29T01:00"], &["10-25T00:30"]),
    ];
    for (pattern, spring, autumn) in table {
        let full = |short: &[&str]| {
            let seconds = |at: &&str| if pattern == "15 30 2 * * *" && *at == "10-25T00:30" { "15" } else { "00" };
            short.iter().map(|at| format!("2026-{at}:{}Z", seconds(at))).collect::<Vec<_>>()
        };
        assert_eq!(days(pattern), (full(spring), full(autumn)), "{pattern}");
    }
    // A whole day that was left out: Samoa had no 2011-12-30.
    assert_eq!(next("0 12 30 12 *", "Pacific/Apia", "2011-12-01T00:00:00Z", 1), ["2011-12-30T10:00:00Z"]);
}

#[test]
fn wrong_patterns_and_zones_are_told_apart() {
    let error = |pattern: &str, zone: &str| Cron::parse(pattern, zone).unwrap_err().to_string();
    assert!(error("* * *", "UTC").contains("is not a cron pattern"));
    assert!(error("61 * * * *", "UTC").contains("is not a cron pattern"));
    assert!(error("0 0 1 1 * * 2030", "UTC").contains("is not a cron pattern"));
    assert!(error(&"1,".repeat(300), "UTC").contains("longer than"));
    assert!(error("0 0 * * *", "Berlin").contains("is not a time zone"));
    assert!(error("0 0 31 2 *", "UTC").contains("never comes"));
    assert!(error("*/30 * * * * *", "UTC").contains("every 30 s"));
    assert!(error("0,10 0 0 1 * *", "UTC").contains("every 10 s"));
}

#[test]
fn what_was_missed_is_one_firing_that_counts_the_others() {
    let cron = Cron::parse("*/5 * * * *", "UTC").unwrap();
    let due = cron.due(ts("2026-11-30T09:00:00Z"), ts("2026-11-30T12:02:00Z"), DAY).unwrap();
    assert_eq!((due.at, due.missed), (ts("2026-11-30T12:00:00Z"), 35));
    assert_eq!(cron.due(due.at, ts("2026-11-30T12:04:59Z"), DAY), None);
    assert_eq!(cron.due(due.at, ts("2026-11-30T12:05:00Z"), DAY).unwrap().missed, 0);
    // Older than the window: never.
    let nightly = Cron::parse("0 3 * * *", "UTC").unwrap();
    let hour = Duration::from_secs(3600);
    assert_eq!(nightly.due(ts("2026-11-01T00:00:00Z"), ts("2026-11-30T05:00:00Z"), hour), None);
    assert!(nightly.due(ts("2026-11-01T00:00:00Z"), ts("2026-11-30T03:59:00Z"), hour).is_some());
}

proptest! {
    /// However the time is cut into looks, each time of the pattern is met by exactly one of them.
    #[test]
    fn looks_at_any_times_meet_each_time_once(steps in prop::collection::vec(1_u64..20_000, 1..40)) {
        let cron = Cron::parse("7,37 */2 * * *", "America/New_York").unwrap();
        let start = ts("2026-10-31T00:00:00Z");
        let (mut cursor, mut now, mut met) = (start, start, 0_u64);
        for step in steps {
            now = now.plus(Duration::from_secs(step));
            if let Some(due) = cron.due(cursor, now, MAX_CATCHUP) {
                met += due.missed + 1;
                cursor = due.at;
            }
        }
        let whole = cron.due(start, now, MAX_CATCHUP).map_or(0, |due| due.missed + 1);
        prop_assert_eq!(met, whole);
    }

    /// A pattern of named hours is met once for each time that the clock shows, whatever the zone does to it.
    #[test]
    fn named_hours_are_met_once_a_day(hours in prop::collection::btree_set(4_u32..24, 1..5), minute in 0_u32..60) {
        let list: Vec<String> = hours.iter().map(ToString::to_string).collect();
        let cron = Cron::parse(&format!("{minute} {} * * *", list.join(",")), "America/New_York").unwrap();
        let year = Duration::from_secs(365 * 24 * 3600);
        let (mut at, end) = (ts("2026-01-01T05:00:00Z"), ts("2026-01-01T05:00:00Z").plus(year));
        let mut met = 0;
        while let Some(next) = cron.next_after(at).filter(|next| *next < end) {
            (at, met) = (next, met + 1);
        }
        prop_assert_eq!(met, 365 * hours.len());
    }

    #[test]
    fn offsets_stay_below_the_jitter_and_are_stable(seed: u128, jitter in 0_u64..1_000_000) {
        let jitter = Duration::from_millis(jitter);
        let one = offset(jitter, seed);
        prop_assert!(one < jitter.max(Duration::from_millis(1)));
        prop_assert_eq!(one, offset(jitter, seed));
    }
}
