//! Calls for a job next to the session.

use kici_dispatch::ports::CloneError;
use kici_dispatch::{AgentAuth, Ownership};
use kici_engine::ids::SessionId;
use kici_engine::lock::{CredentialMaterial, GitCredentials, Material, NamedCredential};
use kici_engine::state::FailureReason;
use kici_protocol::{SESSION_ID_HEADER, common};
use tonic::Code;
use tonic::metadata::MetadataMap;

use crate::registration::new_token;
use crate::support::*;

#[tokio::test(flavor = "multi_thread")]
async fn only_the_session_that_holds_a_job_at_its_epoch_speaks_for_it() {
    each(async |world| {
        let mut holder = Agent::connect(&world, "a1").await;
        let (_, _) = world.create(&[job("build")]).await;
        let offer = holder.offer().await;
        let git = offer.git.clone().expect("the source has credentials");
        assert_eq!((git.hosts[0].host.as_str(), git.repo.is_empty()), ("forge.example", false));
        let held = offer.job.unwrap();
        assert!(holder.begin(&held).await);
        let mut other = Agent::connect(&world, "a2").await;
        let standing = async |session, job: Option<&common::JobRef>| {
            world
                .dispatcher
                .speaks_for(session, job)
                .await
                .map(|speaker| speaker.standing)
                .map_err(|status| status.code())
        };
        assert_eq!(standing(holder.session_id(), Some(&held)).await, Ok(Ownership::Owned));
        let later = common::JobRef { dispatch_epoch: held.dispatch_epoch + 1, ..held.clone() };
        assert_eq!(standing(holder.session_id(), Some(&later)).await, Ok(Ownership::NotOwned));
        assert_eq!(standing(holder.session_id(), None).await, Err(Code::InvalidArgument));
        for _ in 0..5 {
            assert_eq!(standing(other.session_id(), Some(&held)).await, Ok(Ownership::NotOwned));
        }
        assert_eq!(other.goodbye().await, "OWNERSHIP_VIOLATIONS", "as for frames of somebody else's job");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_id_of_a_session_is_worth_nothing_without_the_token_that_it_began_with() {
    each_with(
        |config| config.auth = AgentAuth::Token,
        async |world| {
            let (own, other) = (new_token(&world, |_| {}).await, new_token(&world, |_| {}).await);
            let agent = Agent::with(&world, register("a1", &["default"]), &own).await.unwrap();
            let session = agent.session_id();
            let call = |session: Option<SessionId>, token: Option<&str>| {
                let mut metadata = MetadataMap::new();
                if let Some(session) = session {
                    metadata.insert(SESSION_ID_HEADER, session.uuid().to_string().parse().unwrap());
                }
                if let Some(token) = token {
                    metadata.insert("authorization", token.parse().unwrap());
                }
                world.dispatcher.caller(&metadata).map_err(|status| status.code())
            };
            assert_eq!(call(Some(session), Some(&format!("Bearer {own}"))), Ok(session));
            for token in [None, Some(format!("Bearer {other}")), Some("Bearer ".to_owned()), Some(own.clone())] {
                assert_eq!(call(Some(session), token.as_deref()), Err(Code::Unauthenticated), "{token:?}");
            }
            assert_eq!(call(None, Some(&format!("Bearer {own}"))), Err(Code::Unauthenticated));
            let gone = SessionId::from_uuid(uuid::Uuid::from_u128(7));
            assert_eq!(call(Some(gone), Some(&format!("Bearer {own}"))), Err(Code::PermissionDenied));
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_without_a_checkout_runs_when_its_source_cannot_be_used() {
    each(async |world| {
        let message = "the private key is none".to_owned();
        *world.clones.0.lock().unwrap() =
            Some(CloneError::Permanent { reason: FailureReason::LostCredential, message });
        let mut agent = Agent::connect(&world, "a1").await;
        world.create(&[job("build")]).await;
        let offer = agent.offer().await;
        assert_eq!(offer.git, None);
        assert!(agent.begin(&offer.job.unwrap()).await);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn secrets_that_stand_in_the_workflow_are_masked_from_the_first_step_on() {
    each(async |world| {
        let value = |text: &str| Material::Value(text.to_owned());
        let named = |material| NamedCredential { host: None, repos: Vec::new(), material };
        let basic = CredentialMaterial::Basic { user: value("bot"), token: value("pass-word") };
        let app = CredentialMaterial::GithubApp {
            app_id: value("7"),
            private_key: value("key-text"),
            installation_id: value("9"),
        };
        let all = [("a".to_owned(), named(basic)), ("b".to_owned(), named(app))].into();
        let mut workflow = workflow(&[job("build")]);
        workflow.jobs[0].git_credentials = Some(GitCredentials { named: all, ..GitCredentials::default() });
        let mut agent = Agent::connect(&world, "a1").await;
        let (run, _) = world.new_run(&[job("build")], None, &workflow);
        world.create_run(run).await;
        assert_eq!(agent.offer().await.mask, ["pass-word", "key-text"]);
    })
    .await;
}
