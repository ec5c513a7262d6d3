//! Calls for a job next to the session.

use kici_protocol::common;
use tonic::Code;

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
        let other = Agent::connect(&world, "a2").await;
        let code = async |session, job: Option<&common::JobRef>| {
            world.dispatcher.speaks_for(session, job).await.err().map(|status| status.code())
        };
        assert_eq!(code(holder.session_id(), Some(&held)).await, None);
        assert_eq!(code(other.session_id(), Some(&held)).await, Some(Code::PermissionDenied));
        let later = common::JobRef { dispatch_epoch: held.dispatch_epoch + 1, ..held.clone() };
        assert_eq!(code(holder.session_id(), Some(&later)).await, Some(Code::PermissionDenied));
        assert_eq!(code(holder.session_id(), None).await, Some(Code::InvalidArgument));
    })
    .await;
}
