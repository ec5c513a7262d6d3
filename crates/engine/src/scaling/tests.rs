use proptest::prelude::*;

use super::*;

fn agent() -> AgentId {
    AgentId::new("scaler-container-0123456789abcdef").unwrap()
}

fn all() -> Vec<ScaleVerdict> {
    vec![
        ScaleVerdict::Spawning { backend_type: AgentType::Container, agent_id: agent() },
        ScaleVerdict::AlreadySpawning { agent_id: agent() },
        ScaleVerdict::AtCapacity { cap: Cap::MaxAgents },
        ScaleVerdict::NoBackend { labels: vec!["gpu".into()] },
        ScaleVerdict::Unsatisfiable { cap: Cap::ResourceCapCpu, requested: 8000, max: 4000 },
        ScaleVerdict::Failed { error: "no such image".into() },
        ScaleVerdict::Skipped { reason: "draining".into() },
    ]
}

#[test]
fn verdicts_have_the_words_of_the_wire_and_one_reading() {
    for verdict in all() {
        let json = serde_json::to_value(&verdict).unwrap();
        assert_eq!(json["verdict"], verdict.as_str());
        assert_eq!(serde_json::from_value::<ScaleVerdict>(json).unwrap(), verdict);
    }
    let words: Vec<_> = Cap::ALL.iter().map(|cap| cap.as_str()).collect();
    assert_eq!(
        words.join(" "),
        "global_max_agents max_agents resource_cap_cpu resource_cap_memory global_cap_cpu global_cap_memory \
         machine_pool_cpu machine_pool_memory machine_pool_error cluster_slot cluster_slot_error"
    );
}

#[test]
fn a_waiting_job_says_what_the_scaler_said() {
    let reasons: Vec<_> = all().iter().map(|verdict| verdict.reason().unwrap_or_default()).collect();
    assert_eq!(
        reasons,
        [
            "agent scaler-container-0123456789abcdef (container) is being started for it",
            "agent scaler-container-0123456789abcdef is being started for it",
            "a pool could run it and has no room: max_agents is reached",
            "",
            "no pool is large enough: it asks for 8000 and resource_cap_cpu allows 4000",
            "an agent could not be started for it: no such image",
            "no agent is started for it now: draining",
        ]
    );
}

#[test]
fn jobs_for_a_full_pool_keep_no_job_for_another_one() {
    let mut pass = Pass::default();
    assert!(pass.asks("gpu"));
    pass.note("gpu", &ScaleVerdict::AtCapacity { cap: Cap::MaxAgents });
    assert!(!pass.asks("gpu") && pass.asks("linux"));
}

proptest! {
    #[test]
    fn a_pass_starts_at_most_its_share_and_is_never_told_no_twice(kinds in prop::collection::vec((0..4_usize, 0..7_usize), 0..600)) {
        let (mut pass, mut started, mut refused) = (Pass::default(), 0, BTreeSet::new());
        for (kind, answer) in kinds {
            let kind = format!("k{kind}");
            if !pass.asks(&kind) {
                continue;
            }
            prop_assert!(!refused.contains(&kind));
            let verdict = &all()[answer];
            pass.note(&kind, verdict);
            started += u32::from(matches!(verdict, ScaleVerdict::Spawning { .. }));
            if matches!(verdict.as_str(), "at_capacity" | "no_backend" | "unsatisfiable" | "skipped") {
                refused.insert(kind);
            }
        }
        prop_assert!(started <= MAX_SPAWNS);
        prop_assert_eq!(pass.spawned(), started);
    }
}
