package agent

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestTheKubeletIsAskedOnlyWhileItGivesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var turns turns
		end := turns.answer(t.Context())
		if turns.ask(t.Context()) != nil {
			t.Fatal("asked while a question is open")
		}
		end()
		answered := time.Now()
		done := turns.ask(t.Context())
		if done == nil {
			t.Fatal("not asked, although it is quiet")
		}
		if after := time.Since(answered); after < quietFor || after > quietFor+refreshPoll {
			t.Errorf("asked %s after the last answer, want %s", after, quietFor)
		}
		// A question that comes meanwhile waits for the end of the agent's own.
		var wait sync.WaitGroup
		wait.Go(func() {
			begun := time.Now()
			turns.answer(t.Context())()
			if waited := time.Since(begun); waited != 300*time.Millisecond {
				t.Errorf("a question waited %s", waited)
			}
		})
		time.Sleep(300 * time.Millisecond)
		done()
		wait.Wait()
	})
}

func TestAQuestionDoesNotWaitForeverForTheAgentsOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var turns turns
		time.Sleep(quietFor)
		defer turns.ask(t.Context())()
		begun := time.Now()
		turns.answer(t.Context())()
		if waited := time.Since(begun); waited != turnPatience {
			t.Errorf("waited %s, want %s", waited, turnPatience)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		begun = time.Now()
		turns.answer(ctx)()
		if waited := time.Since(begun); waited > 0 {
			t.Errorf("waited %s for a kubelet that has gone", waited)
		}
	})
}

func TestABusyKubeletIsNotAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var turns turns
		ctx, cancel := context.WithCancel(t.Context())
		var wait sync.WaitGroup
		wait.Go(func() {
			for ctx.Err() == nil {
				turns.answer(ctx)()
				time.Sleep(quietFor / 2)
			}
		})
		synctest.Wait()
		begun := time.Now()
		if turns.ask(ctx) != nil {
			t.Error("asked")
		}
		if waited := time.Since(begun); waited < quietWait || waited > quietWait+2*refreshPoll {
			t.Errorf("waited %s, want %s", waited, quietWait)
		}
		cancel()
		wait.Wait()
	})
}
